// The CPU kernels: plain argument structs, and one table of functions per instruction set.
#pragma once

#include <string>
#include <vector>

#include "../codec.h"
#include "../digest.h"
#include "../linear_codec.h"
#include "../outer_math.h"
#include "../segments.h"
#include "../wire.h"

namespace wsd::cpu {

// What a step writes beside anchor and state, block by block, while they are in the cache.
struct Extras {
  uint16_t* copy;         // bf16 copy of the new anchor; may be null
  DigestColumns columns;  // what the step wrote and is to be digested
};

// `anchor` is of fp32 or of bf16: the kernel that is called says so.
struct Step8 {
  SegmentView segments;
  void* anchor;
  const float* grad;
  CodedState state;
  AdamConstants constants;
  uint64_t seed;
  uint64_t version;  // of the rounding: the number of this step
  const DynamicTables* tables;
  Extras extras;
};

struct Step32 {
  SegmentView segments;
  void* anchor;
  const float* grad;
  float* m;
  float* v;
  AdamConstants constants;
  uint64_t seed;
  uint64_t version;
  Extras extras;
};

struct SgdStep {
  SegmentView segments;
  void* anchor;
  const float* grad;
  float* buffer;  // may be null: no momentum
  SgdConstants constants;
  uint64_t seed;
  uint64_t version;
  Extras extras;
};

struct MomentumStep {
  SegmentView segments;
  void* anchor;
  const float* grad;
  KeptVector momentum;
  KeptVector buffer;  // none where every step renews the momentum
  MomentumConstants constants;
  uint64_t seed;
  uint64_t version;
  Extras extras;
};

struct Moments8 {
  SegmentView segments;
  float* m;
  float* v;
  float eps;  // the eps sqrt(bc2) of the step that encodes
  CodedState state;
  uint64_t seed;
  uint64_t version;
  const DynamicTables* tables;
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
  int64_t num_bytes;
  uint64_t salt;
};

struct BlockDigest {
  SegmentView segments;
  DigestColumns columns;
};

enum AnchorNumber : int { kFp32 = 0, kBf16 = 1, kAnchors = 2 };

template <class Args, class Result>
using Kernel = Result (*)(const Args&, int64_t, int64_t);

template <class Args>
using Check = Kernel<Args, bool>;

struct WireKernels {
  int64_t group_bytes;  // codes and scales of a group
  Check<WireEncode> encode;
  Check<WireDecode> decode;
  Check<WireAccumulate> accumulate;
  Check<WireResidual> residual;
  Check<WireSegments> accumulate_segments;
};

// Every function works on a half-open range: of blocks where there are segments, of elements in finite_check
// and accumulate, of runs in digest, of groups in a payload. A step returns the sum of the digest of its
// blocks.
struct Kernels {
  const char* name;
  Kernel<Step8, uint64_t> step8[kCodecs][kAnchors];
  Kernel<Step32, uint64_t> step32[kAnchors];
  Kernel<SgdStep, uint64_t> sgd[kAnchors];
  Kernel<MomentumStep, uint64_t> momentum[kAnchors];
  Kernel<MomentumStep, uint64_t> momentum8[kAnchors];
  Kernel<Moments8, uint64_t> decode8[kCodecs];
  Kernel<Moments8, uint64_t> encode8[kCodecs];
  Kernel<BlockDigest, uint64_t> digest_blocks;
  Kernel<GradientCheck, bool> gradient_check;
  Kernel<FiniteCheck, bool> finite_check;
  Kernel<Accumulate, bool> accumulate;
  Kernel<Digest, uint64_t> digest;
  WireKernels wire[kWires];
  Check<SegmentSums> block_sumsq;
  Check<SegmentScale> scale_segments;
};

// What this processor can run, slowest first; "scalar" (the compiler's baseline) is always there.
std::vector<const Kernels*> available_kernels();

}  // namespace wsd::cpu
