// bfloat16: the upper half of a float. To nearest for copies, stochastic for what is kept.
#pragma once

#include "portable.h"

namespace wsd {

WSD_FN float bf16_value(uint16_t half) {
  return float_of(static_cast<uint32_t>(half) << 16);
}

// To nearest, ties to even, as torch's .to(torch.bfloat16) does; a NaN stays one and becomes quiet.
WSD_FN uint16_t bf16_nearest(float f) {
  const uint32_t b = bits_of(f);
  const uint32_t rounded = (b + 0x7FFFu + ((b >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>(magnitude_bits(f) > kInfinityBits ? (b >> 16) | 0x40u : rounded);
}

// Up in magnitude with the probability that makes the expectation exact: the part cut off, in 65536ths,
// against the
// upper 16 random bits. A finite number never becomes infinite: next to the largest bf16 it is cut instead.
WSD_FN uint16_t bf16_stochastic(float f, uint32_t random) {
  const uint32_t b = bits_of(f);
  const uint32_t raised = (b + (random >> 16)) >> 16;
  const bool finite_result = (raised & 0x7F80u) != 0x7F80u;
  const uint32_t cut = (b >> 16) | (magnitude_bits(f) > kInfinityBits ? 0x40u : 0u);
  return static_cast<uint16_t>(finite_result ? raised : cut);
}

}  // namespace wsd
