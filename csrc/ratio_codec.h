// The ratio codec: Adam's moments in two bytes a parameter, one fp32 scale each per block.
//
//   s = sqrt(v)             8 bits, log-linear in the float's own bits relative to the block's maximum:
//                           255 steps of 3/32 octave-bits reach 24 octaves down. There is no code for zero,
//                           so a decoded v can never be zero beside an m that is not.
//   r = m / (sqrt(v) + eps) int8, linear, +-127 = the block's largest |r|; code 0 is exactly 0.
//   m = r * (s + eps)
//
// r is the Adam update itself, so its error cannot be blown up by a small v. Both are rounded stochastically:
// with nearest rounding a moment that decays by less than half a step would never decay.
#pragma once

#include "portable.h"

namespace wsd {

struct RatioCodec {
  static constexpr uint32_t kOne = 0x3F800000u;  // bits of 1.0f
  static constexpr uint32_t kStepShift = 18;     // one step is 3 * 2^18 of the 2^23 in an octave
  static constexpr uint32_t kStep = 3u << kStepShift;
  static constexpr uint32_t kLowest = kOne - 255u * kStep;  // bits of the smallest level, about 2^-23.9
  static_assert((kLowest & ((1u << kStepShift) - 1)) == 0, "levels must start on a multiple of 2^18");

  // Below this a block's maximum is stored as 0: its inverse would come near overflow, and both quantities
  // are then far below eps, which is at least 1e-20.
  static constexpr int32_t kSmallestScaleBits = 0x0D800000;  // 2^-100

  static constexpr float kRMax = 127.0f;

  WSD_FN float stored_scale(int32_t maximum_bits) {
    return maximum_bits < kSmallestScaleBits ? 0.0f : float_of(static_cast<uint32_t>(maximum_bits));
  }
  WSD_FN float r_encode_factor(float scale) { return scale > 0.0f ? div(kRMax, scale) : 0.0f; }
  WSD_FN float s_encode_factor(float scale) { return scale > 0.0f ? div(1.0f, scale) : 0.0f; }
  WSD_FN float r_decode_factor(float scale) { return div(scale, kRMax); }

  WSD_FN float decode_r(int8_t code, float decode_factor) {
    return mul(static_cast<float>(static_cast<int32_t>(code)), decode_factor);
  }
  WSD_FN float decode_s(uint8_t code, float scale) {
    return mul(float_of(kLowest + static_cast<uint32_t>(code) * kStep), scale);
  }

  // |r * factor| <= 127 (1 + 2^-22). Adding 384 puts the sum into [256, 512), where an ulp is 2^-15
  // everywhere: the fixed-point number is then in the mantissa, evenly rounded, without a conversion. 15
  // random bits decide between the neighbouring codes; an exact code, 0 above all, never moves.
  WSD_FN int8_t encode_r(float r, float factor, uint32_t random) {
    const int32_t fixed = static_cast<int32_t>(bits_of(add(mul(r, factor), 384.0f)) - 0x43800000u);
    const int32_t raised = fixed + static_cast<int32_t>(random & 0x7FFFu);
    const int32_t offset = raised < 0x7FFFFF ? raised : 0x7FFFFF;  // 127.00002 must not become 128
    return static_cast<int8_t>((offset >> 15) - 128);
  }

  // The random number is one of 65536 midpoints of [0, kStep). Dividing by kStep is a shift by 18 and an
  // exact division by 3 (0x5556 = ceil(2^16 / 3), right for all numbers below 2^15).
  WSD_FN uint8_t encode_s(float s, float factor, uint32_t random) {
    const uint32_t raised = bits_of(mul(s, factor)) + (random >> 16) * 12u + 6u;
    const int32_t steps =
        static_cast<int32_t>(raised >> kStepShift) - static_cast<int32_t>(kLowest >> kStepShift);
    const int32_t thirds = ((steps > 0 ? steps : 0) * 0x5556) >> 16;
    return static_cast<uint8_t>(thirds < 255 ? thirds : 255);
  }
};

}  // namespace wsd
