// What a warp does with a block of 256: lane l holds elements 4 l to 4 l + 3 of each half, so that every
// access of the warp is one unbroken run of memory, 16 bytes a lane for fp32.
#pragma once

#include "../anchor.h"
#include "../counter_hash.h"
#include "../digest.h"
#include "step.h"

#define WSD_DEVICE static __device__ __forceinline__

namespace wsd::cuda {

constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr int32_t kPerLane = 8;

WSD_DEVICE int32_t lane_number() {
  return static_cast<int32_t>(threadIdx.x & 31u);
}

// Place in the block of a lane's i-th element.
WSD_DEVICE int32_t place(int32_t lane, int32_t i) {
  return (i / 4) * (kBlock / 2) + 4 * lane + i % 4;
}

// The blocks of one warp: an unbroken range, so that a segment is looked up once and then walked.
struct Range {
  int64_t begin, end;
};

WSD_DEVICE Range range_of_warp(int64_t num_blocks) {
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (blockDim.x / 32u);
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32u) + threadIdx.x / 32u;
  const int64_t share = num_blocks / warps;
  const int64_t extra = num_blocks % warps;
  const int64_t begin = warp * share + (warp < extra ? warp : extra);
  return Range{begin, begin + share + (warp < extra ? 1 : 0)};
}

// Four elements from `at` on, as far as there are any; the others are 0 and not stored.
WSD_DEVICE void load4(const float* from, int32_t at, int32_t len, float* out) {
  if (at + 4 <= len) {
    const float4 x = *reinterpret_cast<const float4*>(from + at);
    out[0] = x.x;
    out[1] = x.y;
    out[2] = x.z;
    out[3] = x.w;
    return;
  }
  for (int32_t q = 0; q < 4; ++q) out[q] = at + q < len ? from[at + q] : 0.0f;
}

WSD_DEVICE void store4(float* to, int32_t at, int32_t len, const float* x) {
  if (at + 4 <= len) {
    *reinterpret_cast<float4*>(to + at) = make_float4(x[0], x[1], x[2], x[3]);
    return;
  }
  for (int32_t q = 0; q < 4; ++q) {
    if (at + q < len) to[at + q] = x[q];
  }
}

WSD_DEVICE void load4(const uint16_t* from, int32_t at, int32_t len, uint16_t* out) {
  if (at + 4 <= len) {
    const uint2 x = *reinterpret_cast<const uint2*>(from + at);
    out[0] = static_cast<uint16_t>(x.x);
    out[1] = static_cast<uint16_t>(x.x >> 16);
    out[2] = static_cast<uint16_t>(x.y);
    out[3] = static_cast<uint16_t>(x.y >> 16);
    return;
  }
  for (int32_t q = 0; q < 4; ++q) out[q] = at + q < len ? from[at + q] : uint16_t{0};
}

WSD_DEVICE void store4(uint16_t* to, int32_t at, int32_t len, const uint16_t* x) {
  if (at + 4 <= len) {
    *reinterpret_cast<uint2*>(to + at) =
        make_uint2(x[0] | static_cast<uint32_t>(x[1]) << 16, x[2] | static_cast<uint32_t>(x[3]) << 16);
    return;
  }
  for (int32_t q = 0; q < 4; ++q) {
    if (at + q < len) to[at + q] = x[q];
  }
}

// Four codes, packed into a word.
WSD_DEVICE uint32_t load_codes(const uint8_t* from, int32_t at, int32_t len) {
  if (at + 4 <= len) return *reinterpret_cast<const uint32_t*>(from + at);
  uint32_t word = 0;
  for (int32_t q = 0; q < 4; ++q) {
    if (at + q < len) word |= static_cast<uint32_t>(from[at + q]) << (8 * q);
  }
  return word;
}

WSD_DEVICE void store_codes(uint8_t* to, int32_t at, int32_t len, uint32_t word) {
  if (at + 4 <= len) {
    *reinterpret_cast<uint32_t*>(to + at) = word;
    return;
  }
  for (int32_t q = 0; q < 4; ++q) {
    if (at + q < len) to[at + q] = static_cast<uint8_t>(word >> (8 * q));
  }
}

WSD_DEVICE uint32_t warp_largest(uint32_t x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  for (int32_t offset = 16; offset > 0; offset /= 2) {
    const uint32_t other = __shfl_xor_sync(kAll, x, offset);
    x = x > other ? x : other;
  }
  return x;
#else
  return __reduce_max_sync(kAll, x);
#endif
}

WSD_DEVICE uint64_t warp_sum(uint64_t x) {
  for (int32_t offset = 16; offset > 0; offset /= 2) {
    x += __shfl_xor_sync(kAll, static_cast<unsigned long long>(x), offset);
  }
  return x;
}

// The random numbers of a segment's elements; made anew only where the segment or the upper half of the
// element index changes.
struct Dice {
  uint64_t base;
  Counter counter;
  int64_t segment;
  uint64_t high;
};

WSD_DEVICE void turn(Dice* dice, Stream stream, const Common& c, int64_t segment, const Block& b) {
  const uint64_t high = static_cast<uint64_t>(b.element) >> 32;
  if (dice->segment == segment && dice->high == high) return;
  dice->base = counter_base(stream, c.seed, b.key, c.version);
  dice->counter = make_counter(dice->base, high);
  dice->segment = segment;
  dice->high = high;
}

WSD_DEVICE uint32_t roll(const Dice& dice, const Block& b, int32_t at) {
  const uint32_t first = static_cast<uint32_t>(b.element);
  const uint32_t low = first + static_cast<uint32_t>(at);
  if (low >= first) return draw(dice.counter, low);
  return draw(make_counter(dice.base, dice.high + 1), low);
}

// The digest bases of a block, one column a lane.
WSD_DEVICE uint64_t lane_digest_base(const Common& c, int64_t block_number) {
  const int32_t lane = lane_number();
  return digest_base(static_cast<uint64_t>(block_number), c.salt[lane < kMaxColumns ? lane : 0]);
}

WSD_DEVICE uint64_t column_base(uint64_t bases, int32_t column) {
  return __shfl_sync(kAll, static_cast<unsigned long long>(bases), column);
}

WSD_DEVICE uint64_t digest_floats(const float* x, uint64_t base) {
  uint64_t sum = 0;
  for (int32_t q = 0; q < 4; ++q) {
    sum += digest_pair(bits_of(x[q]), bits_of(x[4 + q]), static_cast<uint32_t>(4 * lane_number() + q), base);
  }
  return sum;
}

WSD_DEVICE uint64_t digest_halves(const uint16_t* x, uint64_t base) {
  uint64_t sum = 0;
  for (int32_t q = 0; q < 2; ++q) {
    const uint32_t first = x[2 * q] | static_cast<uint32_t>(x[2 * q + 1]) << 16;
    const uint32_t second = x[4 + 2 * q] | static_cast<uint32_t>(x[5 + 2 * q]) << 16;
    sum += digest_pair(first, second, static_cast<uint32_t>(2 * lane_number() + q), base);
  }
  return sum;
}

WSD_DEVICE void add_digest(uint64_t digest, unsigned long long* to) {
  digest = warp_sum(digest);
  if (lane_number() == 0) atomicAdd(to, static_cast<unsigned long long>(digest));
}

WSD_DEVICE uint64_t digest_anchor(const float* x, uint64_t base) {
  return digest_floats(x, base);
}
WSD_DEVICE uint64_t digest_anchor(const uint16_t* x, uint64_t base) {
  return digest_halves(x, base);
}

}  // namespace wsd::cuda
