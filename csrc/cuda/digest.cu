// Digests of what lies on a device, to the bits of the CPU's: one warp a block of 256, or a run of kDigestRun
// bytes of a plain array.

#include "launch.h"
#include "step.h"
#include "warp.h"

namespace wsd::cuda {
namespace {

WSD_DEVICE uint64_t digest_codes(const uint8_t* codes, int32_t len, uint64_t base) {
  const int32_t lane = lane_number();
  const uint32_t first = load_codes(codes, place(lane, 0), len);
  const uint32_t second = load_codes(codes, place(lane, 4), len);
  return digest_pair(first, second, static_cast<uint32_t>(lane), base);
}

template <class T>
WSD_DEVICE uint64_t digest_values(const T* values, int32_t len, uint64_t base) {
  T x[kPerLane];
  for (int32_t h = 0; h < 2; ++h) load4(values, place(lane_number(), 4 * h), len, x + 4 * h);
  return digest_anchor(x, base);
}

WSD_DEVICE uint64_t digest_column(const DigestColumn& c, const Block& b) {
  const uint64_t base = digest_base(static_cast<uint64_t>(b.scale), c.salt);
  if (c.per_block) {
    const uint32_t word = reinterpret_cast<const uint32_t*>(c.bytes)[b.scale];
    return lane_number() == 0 ? digest_pair(word, 0, 0, base) : 0;
  }
  const unsigned char* from = c.bytes + c.width * b.at;
  if (c.width == 4) return digest_values(reinterpret_cast<const float*>(from), b.len, base);
  if (c.width == 2) return digest_values(reinterpret_cast<const uint16_t*>(from), b.len, base);
  return digest_codes(from, b.len, base);
}

__global__ void __launch_bounds__(kThreads) blocks_kernel(const BlockDigest args) {
  const Range range = range_of_warp(args.segments.num_blocks);
  int64_t segment = -1;
  uint64_t digest = 0;
  for (int64_t number = range.begin; number < range.end; ++number) {
    const Block b = next_block(args.segments, number, &segment);
    for (int32_t i = 0; i < args.columns.count; ++i) digest += digest_column(args.columns.column[i], b);
  }
  add_digest(digest, args.sum);
}

// A run is 256 words, in the places of a block of floats.
__global__ void __launch_bounds__(kThreads) runs_kernel(const Digest args) {
  const Range range = range_of_warp(digest_runs(args.num_bytes));
  uint64_t digest = 0;
  for (int64_t run = range.begin; run < range.end; ++run) {
    const unsigned char* from = args.bytes + run * kDigestRun;
    const int64_t left = args.num_bytes - run * kDigestRun;
    const uint64_t base = digest_base(static_cast<uint64_t>(run), args.salt);
    if (left >= kDigestRun) {
      digest += digest_values(reinterpret_cast<const float*>(from), kBlock, base);
      continue;
    }
    const int32_t len = static_cast<int32_t>(left);
    for (int32_t q = 0; q < 4; ++q) {
      const int32_t word = 4 * lane_number() + q;
      const uint32_t first = load_codes(from, 4 * word, len);
      const uint32_t second = load_codes(from, 4 * word + static_cast<int32_t>(kDigestRun / 2), len);
      digest += digest_pair(first, second, static_cast<uint32_t>(word), base);
    }
  }
  add_digest(digest, args.sum);
}

}  // namespace

const char* launch(const BlockDigest& args, int device, cudaStream_t stream) {
  return on_device(blocks_kernel, args, args.segments.num_blocks, device, stream);
}

const char* launch(const Digest& args, int device, cudaStream_t stream) {
  return on_device(runs_kernel, args, digest_runs(args.num_bytes), device, stream);
}

}  // namespace wsd::cuda
