"""Taking over Adam moments that bitsandbytes keeps in 8 bits, blockwise. The package itself is not needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch

from megatron_wsd.errors import CheckpointError
from megatron_wsd.optim import native
from megatron_wsd.optim.layout import SegmentTable
from megatron_wsd.optim.steps import AdamStep, CodedState

BLOCK = 256  # of bitsandbytes' 8-bit blockwise optimizers
Coded = TypeVar("Coded", bound=CodedState)


def import_bitsandbytes_state(
    state: Mapping[str, Any], table: SegmentTable, hyper: AdamStep, kind: type[Coded]
) -> Coded:
    """Moments of one parameter, from bitsandbytes' optimizer state into a codec of ours.

    Args:
        state: `optimizer.state[p]` of an 8-bit Adam or AdamW, on the CPU, of the whole parameter.
        table: one segment: the shard of that parameter which is wanted.
        hyper: of the step after which the moments stand; its `step` is that of `state`.
        kind: `State8` or `DynamicState8`.

    Returns:
        The shard's moments in that codec.

    Raises:
        CheckpointError: the state is not such a state, is of another step, or does not hold the shard.
        NativeError: the table cannot be used.
    """
    if int(state.get("step", -1)) != hyper.step:
        raise CheckpointError("bitsandbytes state 'step'", f"{hyper.step}, as hyper.step", state.get("step"))
    m, v = decode_bitsandbytes_state(state)
    if table.numel.size != 1:
        raise CheckpointError("table", "one segment", f"{table.numel.size} segments")
    start, end = int(table.element0[0]), int(table.element0[0] + table.numel[0])
    if end > m.numel():
        raise CheckpointError("bitsandbytes state", f"a parameter of {end} elements or more", m.numel())
    place = slice(int(table.offset[0]), int(table.offset[0]) + end - start)
    flat_m, flat_v = (torch.zeros(table.padded, dtype=torch.float32) for _ in range(2))
    flat_m[place], flat_v[place] = m[start:end], v[start:end]
    coded = kind.zeros(table.padded, table.block_size)
    native.encode8(flat_m, flat_v, table, hyper, coded)
    return coded


def decode_bitsandbytes_state(state: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """m and v, fp32 [numel], as bitsandbytes' dequantize_blockwise gives them, but for one repair.

    The maps are taken from the state: their last bits depend on the machine that made them. Where v decodes
    to 0 beside an m that does not, v is set to the largest value that such a code stands for (half of the
    smallest value of the map, times the block's maximum): with 0 the update would be m / eps.

    Args:
        state: as for `import_bitsandbytes_state`; small parameters are in fp32 there and taken as they are.

    Raises:
        CheckpointError: an entry is missing, or its dtype or size does not fit.
    """
    m, v = (_decoded(state, number) for number in (1, 2))
    if m.numel() != v.numel():
        raise CheckpointError("bitsandbytes state 'state2'", f"{m.numel()} elements", v.numel())
    if "absmax2" in state:
        smallest = float(state["qmap2"][state["qmap2"] > 0].min())
        repaired = _spread(state["absmax2"] * (smallest / 2), v.numel())
        v = torch.where((v == 0) & (m != 0), repaired, v)
    return m, v


def _decoded(state: Mapping[str, Any], number: int) -> torch.Tensor:
    codes = _entry(state, f"state{number}", None, None).reshape(-1)
    if codes.dtype == torch.float32:
        return codes.clone()
    if codes.dtype != torch.uint8:
        raise CheckpointError(f"bitsandbytes state 'state{number}'", "dtype uint8 or float32", codes.dtype)
    blocks = -(-codes.numel() // BLOCK)
    values = _entry(state, f"qmap{number}", torch.float32, 256)
    absmax = _entry(state, f"absmax{number}", torch.float32, blocks)
    return values[codes.long()] * _spread(absmax, codes.numel())


def _entry(state: Mapping[str, Any], name: str, dtype: torch.dtype | None, numel: int | None) -> torch.Tensor:
    t = state.get(name)
    field = f"bitsandbytes state {name!r}"
    if not isinstance(t, torch.Tensor) or t.device.type != "cpu":
        remedy = "Only blockwise 8-bit state can be taken over; move it to the CPU first."
        raise CheckpointError(field, "a tensor on the CPU", type(t).__name__, remedy)
    if dtype is not None and t.dtype != dtype:
        raise CheckpointError(field, f"dtype {dtype}", t.dtype)
    if numel is not None and t.numel() != numel:
        raise CheckpointError(field, f"{numel} entries", t.numel(), f"Blocks must be of {BLOCK} elements.")
    return t.detach()


def _spread(per_block: torch.Tensor, numel: int) -> torch.Tensor:
    return per_block.repeat_interleave(BLOCK)[:numel]
