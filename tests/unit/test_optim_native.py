"""What native.py refuses before a pointer crosses, and the digest."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from megatron_wsd.errors import NativeError
from megatron_wsd.optim import native
from megatron_wsd.optim.layout import FlatLayout, Segment, SegmentTable
from megatron_wsd.optim.steps import AdamStep, DynamicState8, SGDStep, State8

LAYOUT = FlatLayout([Segment("w", 1, 500, 0, True), Segment("u", 2, 10, 0, True)])
N = LAYOUT.total
HYPER = AdamStep(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, step=1)
FLAT = ("anchor", "grad", "m", "v", "momentum")


def call(kernel: str, **changed: Any) -> None:
    """Call a kernel with good buffers, except for those named."""
    t: dict[str, Any] = {name: torch.zeros(N) for name in FLAT}
    coded = State8.zeros(N, 256)
    t |= {name: getattr(coded, name) for name in ("r_codes", "s_codes", "r_scale", "s_scale")}
    t |= changed
    state = State8(t["r_codes"], t["s_codes"], t["r_scale"], t["s_scale"])
    if kernel == "step8":
        native.cgad_step8(t["anchor"], t["grad"], state, LAYOUT.table, HYPER)
    elif kernel == "step32":
        native.cgad_step32(t["anchor"], t["grad"], t["m"], t["v"], LAYOUT.table, HYPER)
    elif kernel == "sgd":
        native.sgd_step(t["anchor"], t["grad"], t["momentum"], LAYOUT.table, SGDStep(0.1, 0.9))
    elif kernel == "decode8":
        native.decode8(state, LAYOUT.table, HYPER, t["m"], t["v"])
    else:
        native.encode8(t["m"], t["v"], LAYOUT.table, HYPER, state)


CODED = ("r_codes", "s_codes", "r_scale", "s_scale")
TAKES = {
    "step8": ("anchor", "grad", *CODED),
    "step32": ("anchor", "grad", "m", "v"),
    "sgd": ("anchor", "grad", "momentum"),
    "decode8": (*CODED, "m", "v"),
    "encode8": ("m", "v", *CODED),
}
PAIRS = [(kernel, name) for kernel, names in TAKES.items() for name in names]


@pytest.mark.parametrize("kernel", TAKES)
def test_good_buffers_pass(kernel: str) -> None:
    call(kernel)


@pytest.mark.parametrize("kernel,name", PAIRS)
def test_refuses_bad_buffers(kernel: str, name: str) -> None:
    good = State8.zeros(N, 256).__dict__.get(name, torch.zeros(N))
    bad: list[tuple[Any, str]] = [
        (good.to(torch.float64), f"{name}: expected dtype"),
        (good.to(torch.float16), f"{name}: expected dtype"),
        (good.to("meta"), f"{name}: expected a tensor on the CPU, got meta"),
        (good.to_sparse(), f"{name}: expected a dense tensor"),
        (good.repeat_interleave(2)[::2], f"{name}: expected a contiguous tensor"),
        (good[:-1].clone() if good.numel() > 10 else good[:0], f"{name}: expected"),
        (torch.cat([good, good]), f"{name}: expected"),
        (good.numpy(), f"{name}: expected a torch tensor, got ndarray"),
    ]
    for tensor, message in bad:
        with pytest.raises(NativeError, match=message):
            call(kernel, **{name: tensor})


@pytest.mark.parametrize(
    "kernel,a,b", [(k, n[i], n[j]) for k, n in TAKES.items() for j in range(len(n)) for i in range(j)]
)
def test_refuses_overlap(kernel: str, a: str, b: str) -> None:
    sizes = {name: t.numel() * t.element_size() for name, t in State8.zeros(N, 256).__dict__.items()}
    types = {name: t.dtype for name, t in State8.zeros(N, 256).__dict__.items()}
    memory = torch.zeros(8 * N, dtype=torch.uint8)
    # The second begins in the last bytes of the first.
    start = sizes.get(a, 4 * N) - 4
    first = memory[: start + 4].view(types.get(a, torch.float32))
    second = memory[start : start + sizes.get(b, 4 * N)].view(types.get(b, torch.float32))
    read_only = {"decode8": CODED, "encode8": ("m", "v")}.get(kernel, ("grad",))
    if a in read_only and b in read_only:
        call(kernel, **{a: first, b: second})
    else:
        with pytest.raises(NativeError, match="memory of its own, apart from"):
            call(kernel, **{a: first, b: second})


@pytest.mark.parametrize(
    "change,field",
    [
        ({"lr": float("nan")}, "lr"),
        ({"lr": -1.0}, "lr"),
        ({"lr": float("inf")}, "lr"),
        ({"betas": (1.0, 0.9)}, r"betas\[0\]"),
        ({"betas": (0.9, float("nan"))}, r"betas\[1\]"),
        ({"eps": float("nan")}, "eps"),
        ({"eps": 0.0}, "eps"),
        ({"eps": 1e-30}, "eps"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"gate": 1.5}, "gate"),
        ({"gate": float("nan")}, "gate"),
        ({"step": 0}, "step"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
    ],
)
def test_refuses_bad_numbers(change: dict[str, Any], field: str) -> None:
    good = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0, "step": 1}
    with pytest.raises(NativeError, match=f"{field}: expected"):
        AdamStep(**{**good, **change})


def test_refuses_bad_sgd_numbers() -> None:
    for make, field in [
        (lambda: SGDStep(float("nan")), "lr"),
        (lambda: SGDStep(0.1, 1.0), "momentum"),
        (lambda: SGDStep(0.1, 0.0, True), "nesterov"),
        (lambda: SGDStep(0.1, weight_decay=-1.0), "weight_decay"),
    ]:
        with pytest.raises(NativeError, match=f"{field}: expected"):
            make()
    with pytest.raises(NativeError, match="momentum: expected a buffer exactly where"):
        call("sgd", momentum=None)


def table(**changes: Any) -> SegmentTable:
    columns: dict[str, Any] = {
        "offset": np.array([0, 256], dtype=np.int64),
        "numel": np.array([100, 256], dtype=np.int64),
        "key": np.array([1, 2], dtype=np.uint64),
        "element0": np.array([0, 0], dtype=np.int64),
        "block_size": 256,
    }
    return SegmentTable(**{**columns, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"offset": np.array([0, 100], dtype=np.int64)},  # not aligned
        {"offset": np.array([256, 0], dtype=np.int64)},  # descending
        {"numel": np.array([300, 256], dtype=np.int64)},  # runs into the next
        {"numel": np.array([-1, 256], dtype=np.int64)},
        {"element0": np.array([0, -5], dtype=np.int64)},
        {"key": np.array([1], dtype=np.uint64)},
        {"key": np.array([1, 2], dtype=np.int64)},
        {"numel": np.array([100.0, 256.0])},
        {"block_size": 0},
        {"block_size": 4096},
        {"block_size": 32},
        {"block_size": 96},  # no power of two
    ],
    ids=repr,
)
def test_refuses_bad_tables(changes: dict[str, Any]) -> None:
    bad = table(**changes)
    size = bad.padded if bad.block_size else 512
    with pytest.raises(NativeError, match="table: expected segments that FlatLayout could have made"):
        native.gradient_ok(torch.zeros(size), bad)
    assert native.gradient_ok(torch.zeros(512), table())


@pytest.mark.parametrize("threads", [0, -1, 10**6])
def test_refuses_thread_counts(threads: int) -> None:
    with pytest.raises(NativeError, match="threads: expected a count"):
        native.gradient_ok(torch.zeros(N), LAYOUT.table, threads=threads)


def test_unpadded_end_is_enough() -> None:
    one = FlatLayout([Segment("w", 1, 300, 0, True)])
    assert native.gradient_ok(torch.zeros(300), one.table)


def test_accumulate_refuses() -> None:
    x = torch.zeros(10)
    for make in (
        lambda: native.accumulate(x, torch.zeros(9), 1.0),
        lambda: native.accumulate(x, x, 1.0),
        lambda: native.accumulate(x, torch.zeros(10).double(), 1.0),
        lambda: native.accumulate(x, torch.zeros(10), float("nan")),
    ):
        with pytest.raises(NativeError):
            make()


def test_accumulate_tells_what_a_step_can_take() -> None:
    layout = FlatLayout([Segment("w", 1, 70_000, 0, True)])
    x = torch.randn(layout.total, generator=torch.Generator().manual_seed(0))
    for where in (0, 35_000, 69_999):
        for value, usable in (
            (2.0**63, True),
            (2.0**64, False),
            (float("nan"), False),
            (float("-inf"), False),
        ):
            out, bad = torch.zeros(layout.total), x.clone()
            bad[where] = value
            assert native.accumulate(out, bad, 1.0) is usable
            assert native.gradient_ok(out, layout.table) is usable
    # An overflow of the sum is found as well, and a flaw that was there before.
    out = torch.full((10,), 3e38)
    assert not native.accumulate(out, torch.full((10,), 3e38), 1.0)
    assert not native.accumulate(out, torch.zeros(10), 0.0)
    assert native.accumulate(torch.zeros(0), torch.zeros(0), 1.0)


@pytest.mark.parametrize("kernel", ["step8", "step32", "sgd"])
def test_a_refused_copy_changes_nothing(kernel: str) -> None:
    n, grad = LAYOUT.total, torch.ones(N)
    half = torch.zeros(n, dtype=torch.bfloat16)
    anchors = (torch.zeros(n), torch.zeros(n, dtype=torch.bfloat16))

    def step(anchor: torch.Tensor, copy: Any) -> None:
        if kernel == "step8":
            native.cgad_step8(anchor, grad, State8.zeros(n, 256), LAYOUT.table, HYPER, copy=copy)
        elif kernel == "step32":
            moments = torch.zeros(n), torch.zeros(n)
            native.cgad_step32(anchor, grad, *moments, LAYOUT.table, HYPER, copy=copy)
        else:
            native.sgd_step(anchor, grad, None, LAYOUT.table, SGDStep(0.1), copy=copy)

    for anchor in anchors:
        strided, other = half.repeat(2)[::2], half.float().numpy()
        for copy in (half.float(), half.half(), half[:-1], strided, half.to("meta"), other):
            with pytest.raises(NativeError, match="copy: expected"):
                step(anchor, copy)
        own_memory = anchor if anchor.dtype == torch.bfloat16 else anchor.view(torch.bfloat16)[:n]
        with pytest.raises(NativeError, match="memory of its own"):
            step(anchor, own_memory)
        assert not bool(anchor.any())
        step(anchor, half)
        assert bool(anchor.any())


def test_refuses_a_state_of_another_codec() -> None:
    ratio, dynamic = State8.zeros(N, 256), DynamicState8.zeros(N, 256)
    mixed = DynamicState8(ratio.r_codes, ratio.s_codes, ratio.r_scale, ratio.s_scale)
    with pytest.raises(NativeError, match=r"m_codes: expected dtype torch\.uint8"):
        native.cgad_step8(torch.zeros(N), torch.zeros(N), mixed, LAYOUT.table, HYPER)
    crossed = State8(dynamic.m_codes, dynamic.v_codes, dynamic.m_scale, dynamic.v_scale)
    with pytest.raises(NativeError, match=r"r_codes: expected dtype torch\.int8"):
        native.cgad_step8(torch.zeros(N), torch.zeros(N), crossed, LAYOUT.table, HYPER)


def test_missing_extension_names_the_remedy() -> None:
    code = (
        "import sys; sys.modules['megatron_wsd._C'] = None\n"
        "from megatron_wsd.optim import native\n"
        "native.build_info()"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.returncode != 0
    assert "NativeError: megatron_wsd._C: expected the compiled extension" in out.stderr
    assert "./launch/setup.sh" in out.stderr and "pip install -e ." in out.stderr


def test_build_info() -> None:
    info = native.build_info()
    assert info["isa"] in info["isa_available"] and info["isa_available"][0] == "scalar"
    assert info["threads"] >= 1 and info["compiler"]
    assert info["cuda"] is False or torch.cuda.is_available()
    if not os.environ.get(native.ISA_VARIABLE):
        assert info["isa"] == info["isa_available"][-1]


MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix64(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def run_sum(words: list[int], base: int) -> int:
    half = len(words) // 2
    total = 0
    for j in range(half):
        x = words[j] ^ ((base + j * 0x9E3779B1) & 0xFFFFFFFF)
        y = words[half + j] ^ (((base >> 32) + j * 0x85EBCA77) & 0xFFFFFFFF)
        total += x * y + ((x + 3 * y) << 32)
    return total & MASK


def base_of(position: int, salt: int) -> int:
    return mix64(salt ^ mix64((position + GOLDEN) & MASK))


def words_of(data: bytes, size: int) -> list[int]:
    return np.frombuffer(data.ljust(size, b"\0"), dtype="<u4").tolist()


def python_digest(data: bytes, salt: int) -> int:
    salt = mix64((salt + GOLDEN) & MASK)
    total = 0
    for i in range(-(-len(data) // 1024)):
        total += run_sum(words_of(data[1024 * i : 1024 * (i + 1)], 1024), base_of(i, salt))
    return mix64((total + mix64(len(data) ^ mix64(salt))) & MASK)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 1000, 1024, 1025, 5000])
def test_digest_is_what_it_says(size: int) -> None:
    data = bytes(i * i % 251 for i in range(5000))
    tensor = torch.frombuffer(bytearray(data[: max(size, 1)]), dtype=torch.uint8)[:size]
    for salt in (0, 1, MASK):
        assert native.digest(tensor, salt) == python_digest(data[:size], salt)


def test_digest_sees_every_bit_position_length_and_salt() -> None:
    data = torch.randint(0, 256, (100,), dtype=torch.uint8)
    seen = {native.digest(data), native.digest(data, 1), native.digest(data[:99]), native.digest(data[1:])}
    for i in range(100):
        for bit in range(8):
            other = data.clone()
            other[i] ^= 1 << bit
            seen.add(native.digest(other))
    assert len(seen) == 804
    words = torch.arange(2000, dtype=torch.int64)
    swapped = words.clone()
    swapped[3], swapped[1100] = words[1100], words[3]
    assert native.digest(words) != native.digest(swapped)
    assert native.digest(torch.zeros(8)) != native.digest(torch.zeros(9))


def test_digest_and_finite_do_not_depend_on_threads() -> None:
    x = torch.randn(300_001)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(native.digest(x))
            assert native.all_finite(x)
            for where in (0, 150_000, 300_000):
                for poison in (float("nan"), float("inf"), float("-inf")):
                    bad = x.clone()
                    bad[where] = poison
                    assert not native.all_finite(bad)
    finally:
        torch.set_num_threads(before)
    assert len(set(results)) == 1


def test_all_finite_takes_the_largest_float_and_nothing() -> None:
    assert native.all_finite(torch.full((3,), torch.finfo(torch.float32).max))
    assert native.all_finite(torch.zeros(0))


def test_gradient_limit_is_two_to_the_63() -> None:
    g = torch.zeros(N)
    g[3] = -(2.0**63)
    assert native.gradient_ok(g, LAYOUT.table)
    g[3] = float(np.nextafter(np.float32(2.0**63), np.float32(np.inf)))
    assert not native.gradient_ok(g, LAYOUT.table)


def test_the_lock_is_released_while_a_kernel_runs() -> None:
    x = torch.zeros(1 << 26)
    native.digest(x)  # load everything first
    ticks, stop = [0], threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks[0] += 1
            time.sleep(0.0005)

    thread = threading.Thread(target=tick)
    thread.start()
    interval = sys.getswitchinterval()
    try:
        # No forced switches: the other thread runs only where this one lets go of the lock.
        sys.setswitchinterval(60.0)
        before = ticks[0]
        for _ in range(20):  # on a busy machine the other thread may sleep through some
            native.digest(x)
            if (during := ticks[0] - before) > 2:
                break
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()
    assert during > 2
