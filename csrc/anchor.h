// How an anchor is kept: fp32 as it is, or bf16 rounded stochastically (nearest would lose every step smaller
// than half of a 256th, which at the usual rates is all of them).
#pragma once

#include "bf16.h"

namespace wsd {

struct Fp32Anchor {
  using Type = float;
  static constexpr bool kRandom = false;
  WSD_FN float load(float kept) { return kept; }
  WSD_FN float store(float p, uint32_t) { return p; }
};

struct Bf16Anchor {
  using Type = uint16_t;
  static constexpr bool kRandom = true;
  WSD_FN float load(uint16_t kept) { return bf16_value(kept); }
  WSD_FN uint16_t store(float p, uint32_t random) { return bf16_stochastic(p, random); }
};

}  // namespace wsd
