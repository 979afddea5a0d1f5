// The CUDA steps as the host sees them: plain argument structs, launches on a stream, errors as text.
#pragma once

#include <cuda_runtime.h>

#include "../moments.h"
#include "../segments.h"

namespace wsd::cuda {

constexpr int32_t kBlock = 256;  // elements a block: 8 for each lane of a warp
constexpr int32_t kDigestColumns = 5;

// What every step has. All addresses are of the device.
struct Common {
  SegmentView segments;
  void* anchor;  // fp32, or bf16 if `bf16`
  bool bf16;
  const float* grad;
  uint16_t* copy;              // bf16 copy of the new anchor, or null
  unsigned long long* digest;  // to which the digest is added, or null
  uint64_t salt[kDigestColumns];
  uint64_t seed;
  uint64_t version;
  AdamConstants constants;
};

struct Step8 {
  Common common;
  CodedState state;  // in the ratio codec
};

struct Step32 {
  Common common;
  float* m;
  float* v;
};

struct Flaws {
  SegmentView segments;
  const float* grad;
  unsigned long long* found;  // becomes 1 if a step cannot take the gradient, else 0
};

// Each launches on `stream` of `device` and returns null, or what CUDA says is wrong.
const char* launch(const Step8& args, int device, cudaStream_t stream);
const char* launch(const Step32& args, int device, cudaStream_t stream);
const char* launch(const Flaws& args, int device, cudaStream_t stream);

}  // namespace wsd::cuda
