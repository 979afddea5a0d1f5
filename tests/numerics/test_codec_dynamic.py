"""The dynamic maps: their values, and the encoder against brute force over all 256 of them."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
import torch
from cgad_reference import layout_of, numbers

from megatron_wsd.optim import native
from megatron_wsd.optim.steps import DynamicState8

SIGNED, UNSIGNED = (native.dynamic_map(signed=s).numpy() for s in (True, False))
ISAS = native.build_info()["isa_available"]
Floats = npt.NDArray[np.float32]


def nearest(values: Floats, x: Floats) -> npt.NDArray[np.int64]:
    """Brute force in float64, where the distance of two floats within 2^29 of each other is exact.

    A tie goes to the value nearer to zero. Beyond the ends, and for infinities, the end is nearest.
    """
    wide, x64 = values.astype(np.float64), x.astype(np.float64)
    above = np.clip(np.searchsorted(wide, x64), 1, 255)
    low, high = wide[above - 1], wide[above]
    middle = (low + high) / 2
    up = np.where(low >= 0, x64 > middle, x64 >= middle)
    return np.where(up, above, above - 1)


def encode(m: Floats, v: Floats) -> DynamicState8:
    """Whole 256-blocks."""
    state = DynamicState8.zeros(m.size, 256)
    hyper = numbers(1)
    native.encode8(torch.from_numpy(m), torch.from_numpy(v), layout_of(m.size).table, hyper, state)
    return state


def under_one(x: Floats) -> Floats:
    """The values in blocks whose first element is 1: their scale is then 1."""
    rows = -(-x.size // 255)
    out = np.ones((rows, 256), dtype=np.float32)
    out[:, 1:].flat[: x.size] = x  # type: ignore[union-attr]
    filled = np.ones(rows * 255, dtype=np.float32)
    filled[: x.size] = x
    out[:, 1:] = filled.reshape(rows, 255)
    return out.ravel()


def around(values: Floats, width: int) -> Floats:
    """Every float within `width` of the middle between two neighbours, and of each value itself."""
    middles = ((values[1:].astype(np.float64) + values[:-1].astype(np.float64)) / 2).astype(np.float32)
    centres = np.concatenate([middles, values]).view(np.int32)[:, None]
    near = (centres + np.arange(-width, width + 1, dtype=np.int32)).view(np.float32).ravel()
    return near[np.abs(near) <= 1]


@pytest.mark.parametrize("isa", ISAS)
def test_encoder_is_nearest_around_every_boundary(isa: str) -> None:
    with native.forced_isa(isa):
        m, v = under_one(around(SIGNED, 3000)), under_one(around(UNSIGNED, 3000))
        size = max(m.size, v.size)
        m, v = (np.concatenate([x, np.ones(size - x.size, dtype=np.float32)]) for x in (m, v))
        state = encode(m, v)
    assert np.array_equal(state.m_codes.numpy(), nearest(SIGNED, m))
    assert np.array_equal(state.v_codes.numpy(), nearest(UNSIGNED, v))


def test_encoder_is_nearest_for_random_denormal_and_zero() -> None:
    rng = np.random.default_rng(0)
    spread = rng.integers(0, 0x3F800001, 2_000_000).astype(np.uint32).view(np.float32)
    denormal = rng.integers(0, 1 << 23, 5000).astype(np.uint32).view(np.float32)
    x = under_one(np.concatenate([spread, denormal, np.zeros(3, dtype=np.float32)]))
    signs = np.where(rng.random(x.size) < 0.5, -1, 1).astype(np.float32)
    signs[::256] = 1
    state = encode(x * signs, x)
    assert np.array_equal(state.m_codes.numpy(), nearest(SIGNED, x * signs))
    assert np.array_equal(state.v_codes.numpy(), nearest(UNSIGNED, x))
    assert bool((state.m_codes.numpy()[x == 0] == 127).all())  # -0 too


def test_ties_go_towards_zero() -> None:
    for values in (SIGNED, UNSIGNED):
        pairs = [(Fraction(float(a)) + Fraction(float(b))) / 2 for a, b in pairwise(values)]
        ties = [i for i, middle in enumerate(pairs) if Fraction(float(np.float32(float(middle)))) == middle]
        assert len(ties) > 50
        x = under_one(np.array([float(pairs[i]) for i in ties], dtype=np.float32))
        state = encode(x, np.abs(x))
        codes = state.m_codes if values is SIGNED else state.v_codes
        expected = [i if values[i] >= 0 else i + 1 for i in ties]
        place = np.arange(len(ties))
        assert codes.numpy()[place // 255 * 256 + place % 255 + 1].tolist() == expected


def test_what_is_not_finite_takes_the_outermost_value() -> None:
    # A block with such a number has no finite scale: every quotient is NaN. No step lets such a number in.
    for bad in (float("inf"), float("nan")):
        m = np.full(256, bad, dtype=np.float32)
        m[1::2] = -bad
        state = encode(m, np.full(256, bad, dtype=np.float32))
        assert set(state.m_codes.tolist()) == {0, 255}
        assert set(state.v_codes.tolist()) == {255}


def test_maps_are_what_the_paper_says() -> None:
    for values, first, signed in ((SIGNED, 1, True), (UNSIGNED, 2, False)):
        exact = [0.0, 1.0]
        for decade in range(7):
            parts = first << decade
            exact += [10.0 ** (decade - 6) * (0.1 + 0.9 * (k + 0.5) / parts) for k in range(parts)]
        if signed:
            exact += [-x for x in exact if 0 < x < 1]
        assert values.size == 256 and np.all(np.diff(values) > 0)
        assert 0.0 in values and 1.0 in values
        # Cuts, their mean and the power of ten are rounded to fp32: four roundings, of numbers up to 10 times
        # as large as the result's distance from the cut at 0.1.
        np.testing.assert_allclose(values, sorted(exact), rtol=4 * 2.0**-23)


@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-10, 1.0, 1e30])
def test_decoding_returns_value_times_scale(scale: float) -> None:
    state = DynamicState8.zeros(256, 256)
    state.m_codes.copy_(torch.arange(256, dtype=torch.uint8))
    state.v_codes.copy_(torch.arange(256, dtype=torch.uint8))
    state.m_scale.fill_(scale)
    state.v_scale.fill_(scale)
    m, v = torch.zeros(256), torch.zeros(256)
    native.decode8(state, layout_of(256).table, numbers(1), m, v)
    held = np.float32(scale)
    assert np.array_equal(m.numpy(), SIGNED * held) and np.array_equal(v.numpy(), UNSIGNED * held)
    again = encode(m.numpy(), v.numpy())
    if scale > 1e-30:  # below, neighbouring products fall together
        assert torch.equal(again.m_codes, state.m_codes) and torch.equal(again.v_codes, state.v_codes)
    assert float(again.m_scale) == float(np.float32(scale))


@pytest.mark.parametrize("numel", [1, 255, 256, 1000])
def test_the_step_decodes_steps_and_encodes(numel: int) -> None:
    layout = layout_of(numel)
    n = layout.total
    generator = torch.Generator().manual_seed(4)
    state, m, v = DynamicState8.zeros(n, 256), torch.zeros(n), torch.zeros(n)
    p8, p32 = torch.zeros(n), torch.zeros(n)
    for t in range(1, 6):
        g, hyper = torch.zeros(n), numbers(t, weight_decay=0.1)
        g[:numel] = torch.randn(numel, generator=generator)
        native.decode8(state, layout.table, hyper, m, v)
        p32.copy_(p8)
        assert native.cgad_step8(p8, g, state, layout.table, hyper)
        assert native.cgad_step32(p32, g, m, v, layout.table, hyper)
        expected = encode(m.numpy(), v.numpy())
        # beta1 (code x scale) is rounded in the same order, so nothing differs.
        assert torch.equal(p8, p32)
        for name, tensor in expected.tensors().items():
            got = state.tensors()[name]
            size = numel if "codes" in name else tensor.numel()
            assert torch.equal(got[:size], tensor[:size]), name
