"""The ratio codec against brute force over its 255 levels, and its stochastic rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cgad_reference import layout_of, numbers, state_bits

from megatron_wsd.optim import native
from megatron_wsd.optim.layout import FlatLayout, Segment
from megatron_wsd.optim.steps import State8

# Written from the codec's definition: level c has the float bits of 1.0 minus (255 - c) * 3 * 2^18.
STEP = 3 << 18
LOWEST = 0x3F800000 - 255 * STEP
LEVELS = (LOWEST + STEP * np.arange(256)).astype(np.uint32).view(np.float32)


def encode(m: np.ndarray, v: np.ndarray, eps: float = 2.0**-20, step: int = 1, seed: int = 0) -> State8:
    """Encode whole 256-blocks. beta2 = 0 makes eps sqrt(bc2) exactly eps."""
    layout = layout_of(m.size)
    state = State8.zeros(m.size, 256)
    hyper = numbers(step, eps=eps, betas=(0.9, 0.0), seed=seed)
    native.encode8(torch.from_numpy(m), torch.from_numpy(v), layout.table, hyper, state)
    return state


def blocks_with_one(values: np.ndarray) -> np.ndarray:
    """Values in blocks of 256 whose first element is 1, the block's maximum."""
    rows = -(-values.size // 255)
    out = np.ones((rows, 256), dtype=np.float32)
    padded = np.ones(rows * 255, dtype=np.float32)
    padded[: values.size] = values
    out[:, 1:] = padded.reshape(rows, 255)
    return out.ravel()


def test_levels_are_what_the_codec_decodes() -> None:
    state = State8.zeros(256, 256)
    state.s_codes.copy_(torch.arange(256, dtype=torch.uint8))
    state.r_codes.copy_(torch.arange(-128, 128, dtype=torch.int8))
    state.s_scale.fill_(4.0)
    state.r_scale.fill_(127.0)
    m, v = torch.zeros(256), torch.zeros(256)
    native.decode8(state, layout_of(256).table, numbers(1, eps=2.0**-20, betas=(0.9, 0.0)), m, v)
    s = 4 * LEVELS.astype(np.float64)
    np.testing.assert_allclose(v.numpy(), s * s, rtol=2.0**-23)
    np.testing.assert_allclose(m.numpy(), np.arange(-128, 128) * (s + 2.0**-20), rtol=2.0**-22)
    assert np.all(np.diff(LEVELS) > 0) and LEVELS[0] > 0 and LEVELS[255] == 1
    assert 23.8 < -np.log2(LEVELS[0]) < 24


def test_s_takes_one_of_the_two_levels_around_it() -> None:
    # Around each level, 40 floats on either side; then random ones over the whole range and below it.
    near = (LOWEST + STEP * np.arange(256)[:, None] + np.arange(-40, 41)[None, :]).astype(np.uint32)
    spread = np.random.default_rng(0).integers(1, 0x3F800000, 200_000).astype(np.uint32)
    values = np.concatenate([near.ravel(), spread]).view(np.float32)
    values = values[values <= 1]
    y = blocks_with_one(values)
    y = np.where(y * y > 0, y, np.float32(0))
    s = np.sqrt(y * y)  # sqrt(fl(s^2)) is s itself as long as the square is a normal float
    state = encode(np.zeros_like(y), y * y)
    position = (s.view(np.uint32).astype(np.float64) - LOWEST) / STEP
    floor = np.clip(np.floor(position), 0, 255)
    code = state.s_codes.numpy().astype(np.float64)
    # The random number takes 2^17 values, 6 floats apart from 0 on: a float on a level or up to 5 above it
    # always gets that level.
    tight = (position - np.floor(position)) * STEP < 6
    assert np.all((code == floor) | (code == np.clip(floor + 1, 0, 255)))
    assert np.all(code[tight] == floor[tight])
    assert np.all(code[position < -1] == 0)
    assert {int(c) for c in code} == set(range(256))


def test_r_takes_one_of_the_two_codes_around_it() -> None:
    # v = 0 makes r = m / eps, with eps a power of two.
    exact = np.arange(-127, 128) / 127
    values = np.concatenate([exact, exact + 1e-7, exact - 1e-7, np.linspace(-1, 1, 200_001)])
    values = np.clip(values, -1, 1).astype(np.float32)
    r = blocks_with_one(values)
    code = encode(r * np.float32(2.0**-20), np.zeros_like(r)).r_codes.numpy().astype(np.float64)
    position = r.astype(np.float64) * 127
    # The fixed point has 15 bits, and scaling rounds twice: 127 * 2^-23 < 2^-15 as well.
    assert np.all(np.abs(code - position) < 1 + 2.0**-14)
    whole = np.abs(position - np.round(position)) < 2.0**-17
    assert whole.sum() > 255
    assert np.all(np.abs(code[whole] - np.round(position[whole])) <= 1)
    assert np.all(code[r == 0] == 0)
    assert np.all(code[np.abs(r) == 1] == 127 * r[np.abs(r) == 1])


def test_the_largest_number_of_a_block_is_coded_exactly() -> None:
    # Blocks of one element: each is its block's largest, whatever its mantissa, and must neither pass 127 or
    # 255 nor fall short of it.
    count = 30_000
    layout = FlatLayout([Segment(f"p{i}", i, 1, 0, True) for i in range(count)], 64)
    mantissa = np.random.default_rng(5).integers(0, 1 << 23, count)
    value = (mantissa | 0x3F800000).astype(np.uint32).view(np.float32)
    sign = np.where(np.arange(count) % 2, 1, -1).astype(np.float32)
    m, v = torch.zeros(layout.total), torch.zeros(layout.total)
    for seed in (0, 1):
        for scale, moment in ((0.0, 2.0**-20), (1.0, 1.0)):  # v = 0 makes r = m / eps; else s is large
            m[::64] = torch.from_numpy(value * sign * np.float32(moment))
            v[::64] = torch.from_numpy((value * np.float32(scale)) ** 2)
            state = State8.zeros(layout.total, 64)
            hyper = numbers(1, eps=2.0**-20, betas=(0.9, 0.0), seed=seed)
            native.encode8(m, v, layout.table, hyper, state)
            assert np.array_equal(state.r_codes[::64].numpy(), (127 * sign).astype(np.int8))
            assert np.all(state.s_codes[::64].numpy() == (255 if scale else 0))


def test_zero_and_negligible_blocks_decode_to_zero() -> None:
    for size in (0.0, 1e-38, 1e-31):
        m = np.full(256, size * 1e-8, dtype=np.float32)
        v = np.full(256, size * size, dtype=np.float32)
        state = encode(m, v, eps=1e-8)
        assert float(state.s_scale) == 0.0
        out_m, out_v = torch.ones(256), torch.ones(256)
        native.decode8(state, layout_of(256).table, numbers(1, betas=(0.9, 0.0)), out_m, out_v)
        assert float(out_v.abs().max()) == 0.0
        assert float(out_m.abs().max()) <= 1e-38


def test_round_trip_error_bound() -> None:
    rng = np.random.default_rng(1)
    v = np.exp(rng.normal(0, 4, 256 * 200)).astype(np.float32)
    m = (np.sqrt(v) * rng.uniform(-1, 1, v.size)).astype(np.float32)
    state = encode(m, v)
    out_m, out_v = torch.zeros(v.size), torch.zeros(v.size)
    hyper = numbers(1, eps=2.0**-20, betas=(0.9, 0.0))
    native.decode8(state, layout_of(v.size).table, hyper, out_m, out_v)
    s, s_out = np.sqrt(v.astype(np.float64)), np.sqrt(out_v.numpy().astype(np.float64))
    # Neighbouring levels differ by at most 3/32 of the lower one; no s here is below the last.
    assert np.all(np.abs(s_out - s) <= s * 3 / 32 * 1.0001)
    r, r_out = m / (s + 2.0**-20), out_m.numpy() / (s_out + 2.0**-20)
    code = np.repeat(state.r_scale.numpy(), 256) / 127
    assert np.all(np.abs(r_out - r) <= code * 1.001)


COPIES = 4096


def many_roundings(seed: int, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """One 256-block encoded as COPIES parameters: codes of r and s, and their exact positions."""
    rng = np.random.default_rng(2)
    s = np.exp(rng.uniform(-10, 0, 256)).astype(np.float32)
    s[0] = 1.0
    m = (rng.uniform(-1, 1, 256) * s).astype(np.float32)
    m[0] = s[0]
    v = s * s
    layout = FlatLayout([Segment(f"p{i}", i, 256, 0, True) for i in range(COPIES)])
    state = State8.zeros(layout.total, 256)
    hyper = numbers(step, eps=2.0**-40, betas=(0.9, 0.0), seed=seed)
    native.encode8(
        torch.from_numpy(np.tile(m, COPIES)), torch.from_numpy(np.tile(v, COPIES)), layout.table, hyper, state
    )
    r = m.astype(np.float64) / (s.astype(np.float64) + 2.0**-40)
    r_position = r / float(state.r_scale[0]) * 127
    s_position = (s.view(np.uint32).astype(np.float64) - LOWEST) / STEP
    shape = (COPIES, 256)
    r_codes, s_codes = state.r_codes.numpy().reshape(shape), state.s_codes.numpy().reshape(shape)
    return r_codes.astype(np.float64), s_codes.astype(np.float64), r_position, s_position


@pytest.mark.parametrize("seed,step", [(0, 1), (1, 1), (2**64 - 1, 123_456)])
def test_rounding_is_unbiased(seed: int, step: int) -> None:
    r_codes, s_codes, r_position, s_position = many_roundings(seed, step)
    for codes, position in ((r_codes, r_position), (s_codes, s_position)):
        error = codes - position
        # A rounding has a standard deviation of at most 1/2 code; 6 of them, over COPIES draws and over all.
        assert np.abs(error.mean(axis=0)).max() <= 6 * 0.5 / np.sqrt(COPIES)
        assert abs(error.mean()) <= 6 * 0.5 / np.sqrt(error.size)
        # Elements of one draw, draws of one element, and r and s of one element are uncorrelated.
        z = error / np.maximum(error.std(axis=0), 1e-9)
        z = z[:, error.std(axis=0) > 0.05]
        bound = 6 / np.sqrt(z.size)
        assert abs((z[:, 1:] * z[:, :-1]).mean()) <= bound
        assert abs((z[1:] * z[:-1]).mean()) <= bound
    both = (r_codes - r_position) * (s_codes - s_position)
    assert abs(both.mean()) <= 6 * 0.25 / np.sqrt(both.size)


def test_rounding_repeats_itself_and_depends_on_every_key() -> None:
    rng = np.random.default_rng(3)
    m, v = rng.normal(size=1024).astype(np.float32), rng.uniform(0.1, 1, 1024).astype(np.float32)
    first = state_bits(encode(m, v, step=7, seed=3))
    assert state_bits(encode(m, v, step=7, seed=3)) == first
    assert state_bits(encode(m, v, step=8, seed=3)) != first
    assert state_bits(encode(m, v, step=7, seed=4)) != first
    state = State8.zeros(1024, 256)
    other = FlatLayout([Segment("other", 99, 1024, 0, True)])
    hyper = numbers(7, eps=2.0**-20, betas=(0.9, 0.0), seed=3)
    native.encode8(torch.from_numpy(m), torch.from_numpy(v), other.table, hyper, state)
    assert state_bits(state) != first
