"""The wire, digests and outer optimizers on a device against the CPU, with what tests/numerics compares."""

from __future__ import annotations

import pytest
import torch
from cgad_reference import bits, gradients, layout_of
from test_wire_codec import FORMATS, KINDS, inputs
from test_wire_cuda_on_cpu import run_chunk
from test_wire_segments import run_all

from megatron_wsd.optim import native
from megatron_wsd.optim.layout import FlatLayout, Segment
from megatron_wsd.optim.outer import OuterHyper, make_outer
from megatron_wsd.optim.wire import WireFormat

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device and a CUDA build of torch"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORMATS)
def test_a_chunk_has_the_bits_of_the_cpu(name: str, kind: str) -> None:
    fmt = WireFormat.of(name)
    for groups in (0, 1, 7, 8, 9, 4001, 60_000):
        x = inputs(kind, 256 * groups)
        assert run_chunk(fmt, x.cuda(), 0.3) == run_chunk(fmt, x, 0.3), groups


@pytest.mark.parametrize(
    "numels", [(1,), (1, 255, 0, 256, 257, 70_000, 5, 1, 33_000), (0, 0, 300), (2**21 + 3, 2**18 - 1), (0,)]
)
def test_segments_have_the_bits_of_the_cpu(numels: tuple[int, ...]) -> None:
    layout = layout_of(*numels)
    assert run_all(layout, 1, "cuda") == run_all(layout, 1)


@pytest.mark.parametrize("nbytes", [0, 1, 3, 511, 1024, 1025, 70_001, 2**24 + 5])
def test_digest_of_a_plain_array(nbytes: int) -> None:
    array = torch.randint(0, 256, (nbytes,), generator=torch.Generator().manual_seed(7), dtype=torch.uint8)
    for salt in (0, 2**64 - 1):
        assert native.digest(array.cuda(), salt) == native.digest(array, salt)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["cgad", "sgd", "nesterov", "delayed_nesterov"])
def test_outer_optimizers_hold_the_same_state(kind: str, dtype: torch.dtype) -> None:
    shards = ((5000, 2**32 - 100), (257, 1), (0, 0), (2**18 + 3, 0), (1, 0), (300, 2**40))
    layout = FlatLayout([Segment(f"p{i}", 50 + i, n, at, i % 2 == 0) for i, (n, at) in enumerate(shards)])
    hyper = OuterHyper(lr=0.1, momentum=0.0 if kind == "sgd" else 0.9, momentum_period=2, seed=3)
    here, there = (make_outer(kind, layout, hyper, dtype, device) for device in ("cpu", "cuda"))
    anchor = torch.zeros(layout.total, dtype=dtype)
    theirs = anchor.cuda()
    draw = gradients("heavy", layout.total, seed=13)
    for _ in range(5):
        g = draw()
        digest = here.step(anchor, g)
        assert there.step(theirs, g.cuda()) == digest
        there.forget_digest()
        assert there.digest(theirs) == digest
    assert bits(anchor.view(torch.uint8)) == bits(theirs.cpu().view(torch.uint8))


def test_every_stream_waits_for_its_own_work() -> None:
    fmt, stream = WireFormat.of("int8"), torch.cuda.Stream()
    x = inputs("gauss", 256 * 4000)
    expected = run_chunk(fmt, x, 0.3)
    torch.cuda._sleep(10**8)  # the default stream has other things to do
    with torch.cuda.stream(stream):
        there = x.pin_memory().to("cuda", non_blocking=True)  # still on its way
        assert run_chunk(fmt, there, 0.3) == expected
