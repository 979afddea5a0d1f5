// The CUDA steps as the host sees them: plain argument structs, launches on a stream, errors as text.
#pragma once

#include <cuda_runtime.h>

#include "../digest.h"
#include "../moments.h"
#include "../segments.h"

namespace wsd::cuda {

constexpr int32_t kBlock = 256;  // elements a block: 8 for each lane of a warp

// What every step has. All addresses are of the device.
struct Common {
  SegmentView segments;
  void* anchor;  // fp32, or bf16 if `bf16`
  bool bf16;
  const float* grad;
  uint16_t* copy;              // bf16 copy of the new anchor, or null
  unsigned long long* digest;  // to which the digest is added, or null
  uint64_t salt[kMaxColumns];
  uint64_t seed;
  uint64_t version;
};

struct Step8 {
  Common common;
  AdamConstants constants;
  CodedState state;  // in the ratio codec
};

struct Step32 {
  Common common;
  AdamConstants constants;
  float* m;
  float* v;
};

// The two below have no digest of their own: what they wrote is digested by a launch of `BlockDigest`.
struct SgdStep {
  Common common;
  float* buffer;  // null: no momentum
  SgdConstants constants;
};

struct MomentumStep {
  Common common;
  KeptVector momentum;
  KeptVector buffer;  // none where every step renews the momentum
  MomentumConstants constants;
};

struct Flaws {
  SegmentView segments;
  const float* grad;
  unsigned long long* found;  // becomes 1 if a step cannot take the gradient, else 0
};

// The digest of memory that no step has just written: of columns of a flat state, or of a plain array.
struct BlockDigest {
  SegmentView segments;
  DigestColumns columns;
  unsigned long long* sum;  // to which it is added
};

struct Digest {
  const unsigned char* bytes;
  int64_t num_bytes;
  uint64_t salt;
  unsigned long long* sum;  // likewise; digest_finish() is still to come
};

// Each launches on `stream` of `device` and returns null, or what CUDA says is wrong.
const char* launch(const Step8& args, int device, cudaStream_t stream);
const char* launch(const Step32& args, int device, cudaStream_t stream);
const char* launch(const SgdStep& args, int device, cudaStream_t stream);
const char* launch(const MomentumStep& args, int device, cudaStream_t stream);
const char* launch(const Flaws& args, int device, cudaStream_t stream);
const char* launch(const BlockDigest& args, int device, cudaStream_t stream);
const char* launch(const Digest& args, int device, cudaStream_t stream);

}  // namespace wsd::cuda
