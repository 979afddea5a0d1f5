// The CPU kernels: plain argument structs, and one table of functions per instruction set.
#pragma once

#include <string>
#include <vector>

#include "../outer_math.h"
#include "../segments.h"

namespace wsd::cpu {

struct CodedState {
  int8_t* r_codes;
  uint8_t* s_codes;
  float* r_scale;
  float* s_scale;
};

struct Step8 {
  SegmentView segments;
  float* anchor;
  const float* grad;
  CodedState state;
  AdamConstants constants;
  uint64_t seed;
  uint64_t version;  // of the rounding: the number of this step
};

struct Step32 {
  SegmentView segments;
  float* anchor;
  const float* grad;
  float* m;
  float* v;
  AdamConstants constants;
};

struct SgdStep {
  SegmentView segments;
  float* anchor;
  const float* grad;
  float* buffer;  // may be null: no momentum
  SgdConstants constants;
};

struct Decode8 {
  SegmentView segments;
  CodedState state;
  float eps;  // the eps sqrt(bc2) of the step that encoded
  float* m;
  float* v;
};

struct Encode8 {
  SegmentView segments;
  const float* m;
  const float* v;
  float eps;
  CodedState state;
  uint64_t seed;
  uint64_t version;
};

struct GradientCheck {
  SegmentView segments;
  const float* grad;
};

struct FiniteCheck {
  const float* x;
};

struct Accumulate {
  float* out;
  const float* x;
  float weight;
};

struct Digest {
  const unsigned char* bytes;
  uint64_t salt;
};

// Every function works on a half-open range: of blocks where there are segments, of elements in finite_check
// and accumulate, of whole 8-byte words in digest (whose result is the sum of the words; the caller adds the
// tail).
struct Kernels {
  const char* name;
  void (*step8)(const Step8&, int64_t, int64_t);
  void (*step32)(const Step32&, int64_t, int64_t);
  void (*sgd)(const SgdStep&, int64_t, int64_t);
  void (*decode8)(const Decode8&, int64_t, int64_t);
  void (*encode8)(const Encode8&, int64_t, int64_t);
  bool (*gradient_check)(const GradientCheck&, int64_t, int64_t);
  bool (*finite_check)(const FiniteCheck&, int64_t, int64_t);
  void (*accumulate)(const Accumulate&, int64_t, int64_t);
  uint64_t (*digest)(const Digest&, int64_t, int64_t);
};

// What this processor can run, slowest first; "scalar" (the compiler's baseline) is always there.
std::vector<const Kernels*> available_kernels();

}  // namespace wsd::cpu
