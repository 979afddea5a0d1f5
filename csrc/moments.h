// What an optimizer keeps, and the words that codecs of Adam's moments share.
#pragma once

#include "outer_math.h"

namespace wsd {

struct DynamicTables;

struct CodedState {
  uint8_t* a_codes;
  uint8_t* b_codes;
  float* a_scale;
  float* b_scale;
};

// A vector of the state: fp32, or int8 codes with one fp32 scale a block. `values` may be null: none.
struct KeptVector {
  void* values;
  float* scale;
};

// What codecs need beyond a block's scales.
struct CodecContext {
  float beta1;                  // folded into decoding
  float eps_before, eps;        // of the step that encoded what is decoded, and of the one that encodes
  const DynamicTables* tables;  // of the dynamic codec
};

struct OldMoments {
  float decayed_m, v;  // beta1 m, v
};

struct Stored {
  float a, b;
};

}  // namespace wsd
