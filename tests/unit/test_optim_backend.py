"""Where steps run, and the CUDA extension as far as it can be called without a device."""

from __future__ import annotations

import importlib
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megatron_wsd.errors import NativeError
from megatron_wsd.optim import backend, extension, native
from megatron_wsd.optim.layout import FlatLayout, Segment
from megatron_wsd.optim.steps import AdamStep, DynamicState8, State8

LAYOUT = FlatLayout([Segment("w", 1, 500, 0, True)])
WITHOUT_DEVICE = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")


@pytest.fixture
def cuda_module() -> ModuleType:
    try:
        return importlib.import_module("megatron_wsd._CUDA")
    except ImportError:
        pytest.skip("the CUDA extension is not built here: no nvcc, or MEGATRON_WSD_CUDA=0")


@WITHOUT_DEVICE
def test_the_cuda_extension_is_loaded_only_where_torch_has_a_device() -> None:
    with pytest.raises(NativeError, match="device: expected a CUDA device that torch can use, got none"):
        extension.cuda_extension()
    assert native.build_info()["cuda"] is False


@WITHOUT_DEVICE
def test_a_failed_launch_is_an_error_with_a_text(
    cuda_module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The whole way to the launch, with buffers of the CPU in place of those of a device that is not there.
    monkeypatch.setattr(backend, "cuda_extension", lambda: cuda_module)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
    where = backend.CudaBackend(LAYOUT.table, torch.device("cpu", 0))
    g, hyper = torch.zeros(LAYOUT.total), AdamStep(1e-3, (0.9, 0.95), 1e-8, 0.0, 1)
    with pytest.raises(RuntimeError, match=r"CUDA: .*(driver|device)"):
        where.gradient_ok(g.data_ptr())
    call = where.step_call(g.data_ptr(), False, g.data_ptr(), 0, [(0, 4, False, 2**64 - 1)])
    addresses = (g.data_ptr(),) * 4
    numbers = native.adam(hyper, where)
    for launch in (
        lambda: cuda_module.cgad_step8(where.segments, call, 0, addresses, numbers),
        lambda: cuda_module.cgad_step32(where.segments, call, *addresses[:2], numbers),
    ):
        with pytest.raises(RuntimeError, match=r"CUDA: .*(driver|device)"):
            launch()


def test_cuda_takes_blocks_of_256_in_the_ratio_codec(
    cuda_module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "cuda_extension", lambda: cuda_module)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
    other = FlatLayout([Segment("w", 1, 500, 0, True)], block_size=64)
    with pytest.raises(NativeError, match="block_size: expected 256 on a CUDA device, got 64"):
        backend.CudaBackend(other.table, torch.device("cpu", 0))
    where = backend.CudaBackend(LAYOUT.table, torch.device("cpu", 0))
    assert where.codec(State8.zeros(512, 256)) == 0
    with pytest.raises(NativeError, match="state: expected the ratio codec"):
        where.codec(DynamicState8.zeros(512, 256))


def test_a_table_is_uploaded_once(cuda_module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "cuda_extension", lambda: cuda_module)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
    layout = FlatLayout([Segment("w", 2**64 - 1, 500, 0, True), Segment("e", 3, 0, 0, True)])
    first = backend.CudaBackend(layout.table, torch.device("cpu", 0))
    assert backend.CudaBackend(layout.table, torch.device("cpu", 0)).segments is first.segments


def test_scalar_code_says_so_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(extension.ISA_VARIABLE, "scalar")
    before = native.build_info()["isa"]
    try:
        extension.extension.cache_clear()
        for _ in range(3):
            native.build_info()
        assert [r.message for r in caplog.records if "without vector instructions" in r.message][1:] == []
        assert "without vector instructions" in caplog.text
        assert native.build_info()["isa"] == "scalar"
    finally:
        extension.extension().use_isa(before)
