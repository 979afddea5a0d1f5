// The ratio codec: Adam's moments in two bytes a parameter, one fp32 scale each per block.
//
//   b: s = sqrt(v)             8 bits, log-linear in the float's own bits relative to the block's maximum:
//                              255 steps of 3/32 octave-bits reach 24 octaves down. There is no code for
//                              zero, so a decoded v can never be zero beside an m that is not.
//   a: r = m / (sqrt(v) + eps) int8, linear, +-127 = the block's largest |r|; code 0 is exactly 0.
//   m = r * (s + eps)
//
// r is the Adam update itself, so its error cannot be blown up by a small v. Both are rounded stochastically:
// with nearest rounding a moment that decays by less than half a step would never decay.
#pragma once

#include "moments.h"

namespace wsd {

struct RatioCodec {
  static constexpr bool kRandom = true;
  static constexpr uint32_t kOne = 0x3F800000u;             // bits of 1.0f
  static constexpr uint32_t kStep = 3u << 18;               // one step, of the 2^23 in an octave
  static constexpr uint32_t kLowest = kOne - 255u * kStep;  // bits of the smallest level, about 2^-23.9
  static_assert((kLowest & 0x3FFFFu) == 0, "levels must be multiples of 2^18: then 16 bits hold them");

  // Below this a block's maximum is stored as 0: its inverse would come near overflow, and both quantities
  // are then far below eps, which is at least 1e-20.
  static constexpr int32_t kSmallestScaleBits = 0x0D800000;  // 2^-100

  static constexpr float kRMax = 127.0f;

  WSD_FN float stored_scale(int32_t maximum_bits) {
    return maximum_bits < kSmallestScaleBits ? 0.0f : float_of(static_cast<uint32_t>(maximum_bits));
  }

  struct Decoder {
    float r_factor, s_scale, eps;
  };
  // `gain` multiplies every m.
  WSD_FN Decoder decoder(float r_scale, float s_scale, float gain, float eps, const CodecContext&) {
    return Decoder{mul(div(r_scale, kRMax), gain), s_scale, eps};
  }
  WSD_FN OldMoments decode(const Decoder& d, uint8_t r_code, uint8_t s_code) {
    // The level in 16 bits, where vectors are twice as long.
    const uint16_t level = static_cast<uint16_t>(static_cast<uint16_t>(s_code) * 3u + (kLowest >> 18));
    const float s = mul(float_of(static_cast<uint32_t>(level) << 18), d.s_scale);
    const float r = mul(static_cast<float>(static_cast<int32_t>(static_cast<int8_t>(r_code))), d.r_factor);
    return OldMoments{mul(r, add(s, d.eps)), mul(s, s)};
  }

  WSD_FN Stored stored(const AdamElement& e) { return Stored{e.r, e.s}; }
  WSD_FN Stored stored_of(float m, float v, float eps) {
    const float s = root(v);
    return Stored{div(m, add(s, eps)), s};
  }

  struct Encoder {
    float r_factor, s_factor;
  };
  WSD_FN Encoder encoder(float r_scale, float s_scale, const CodecContext&) {
    return Encoder{r_scale > 0.0f ? div(kRMax, r_scale) : 0.0f, s_scale > 0.0f ? div(1.0f, s_scale) : 0.0f};
  }

  // Adding 384 puts the sum into [256, 512), where an ulp is 2^-15 everywhere: the fixed-point number is then
  // in the mantissa, evenly rounded, without a conversion. The lower 15 random bits decide between the
  // neighbouring codes; an exact code, 0 above all, never moves. |r * factor| <= 127 (1 + 2^-23) lies at most
  // half an ulp of the sum beyond 127 and is rounded to it, so no code passes +-127.
  WSD_FN uint16_t fixed_a(const Encoder& e, float r, uint32_t random) {
    const uint32_t sum = bits_of(add(mul(r, e.r_factor), 384.0f)) + (random & 0x7FFFu);
    return static_cast<uint16_t>(sum >> 15);
  }
  WSD_FN uint8_t code_a(uint16_t fixed) { return static_cast<uint8_t>(fixed ^ 0x80u); }

  // The upper 17 random bits choose one of 131072 multiples of 6 in [0, kStep), so that even a decay by 1e-5
  // of a step has its chance. Dividing by kStep is a shift by 18 and an exact division by 3 (0x5556 =
  // ceil(2^16 / 3), right for all numbers below 2^15).
  WSD_FN uint16_t fixed_b(const Encoder& e, float s, uint32_t random) {
    return static_cast<uint16_t>((bits_of(mul(s, e.s_factor)) + (random >> 15) * 6u) >> 18);
  }
  // s * factor is at most 1 + 2^-23, so the sum stays below 256 steps.
  WSD_FN uint8_t code_b(uint16_t fixed) {
    const int16_t above = static_cast<int16_t>(fixed - (kLowest >> 18));
    const uint16_t steps = static_cast<uint16_t>(above > 0 ? above : 0);
    return static_cast<uint8_t>((static_cast<uint32_t>(steps) * 0x5556u) >> 16);
  }
};

}  // namespace wsd
