// The linear codec of a vector: int8, +-127 = the block's largest magnitude, one fp32 scale a block; code 0
// is exactly 0. Rounded stochastically: with nearest rounding a momentum that decays by less than half a step
// would never decay. It is the half of the ratio codec that keeps r.
#pragma once

#include "ratio_codec.h"

namespace wsd {

struct LinearCodec {
  WSD_FN float stored_scale(int32_t maximum_bits) { return RatioCodec::stored_scale(maximum_bits); }
  WSD_FN float decode_factor(float scale) { return div(scale, RatioCodec::kRMax); }
  WSD_FN float decode(float factor, uint8_t code) {
    return mul(static_cast<float>(static_cast<int32_t>(static_cast<int8_t>(code))), factor);
  }
  WSD_FN float encode_factor(float scale) { return scale > 0.0f ? div(RatioCodec::kRMax, scale) : 0.0f; }
  WSD_FN uint16_t fixed(float factor, float x, uint32_t random) {
    return RatioCodec::fixed_a(RatioCodec::Encoder{factor, 0.0f}, x, random);
  }
  WSD_FN uint8_t code(uint16_t fixed) { return RatioCodec::code_a(fixed); }
};

}  // namespace wsd
