// The wire formats on a device: one warp a group of 256. The arithmetic is that of wire.h, which the CPU uses
// too; here are only the ways of a warp through memory.

#include "wire.h"

#include "launch.h"
#include "warp.h"

namespace wsd::cuda {
namespace {

// A format is its layout and
//   place()     element of the group at which a lane's first or second four begin
//   encode()    a lane's eight numbers to its codes, and with its neighbours to scales
//   decode()    and back

struct Fp32Wire : Fp32Layout {
  WSD_DEVICE int32_t place(int32_t h) { return cuda::place(lane_number(), 4 * h); }
  WSD_DEVICE void encode(const float* x, uint8_t* codes, float*) {
    float* to = reinterpret_cast<float*>(codes);
    for (int32_t h = 0; h < 2; ++h) store4(to, place(h), kWireGroup, x + 4 * h);
  }
  WSD_DEVICE void decode(const uint8_t* codes, const float*, float* x) {
    const float* from = reinterpret_cast<const float*>(codes);
    for (int32_t h = 0; h < 2; ++h) load4(from, place(h), kWireGroup, x + 4 * h);
  }
};

struct Bf16Wire : Bf16Layout {
  WSD_DEVICE int32_t place(int32_t h) { return cuda::place(lane_number(), 4 * h); }
  WSD_DEVICE void encode(const float* x, uint8_t* codes, float*) {
    uint16_t* to = reinterpret_cast<uint16_t*>(codes);
    for (int32_t h = 0; h < 2; ++h) {
      uint16_t halves[4];
      for (int32_t q = 0; q < 4; ++q) halves[q] = bf16_nearest(x[4 * h + q]);
      store4(to, place(h), kWireGroup, halves);
    }
  }
  WSD_DEVICE void decode(const uint8_t* codes, const float*, float* x) {
    const uint16_t* from = reinterpret_cast<const uint16_t*>(codes);
    for (int32_t h = 0; h < 2; ++h) {
      uint16_t halves[4];
      load4(from, place(h), kWireGroup, halves);
      for (int32_t q = 0; q < 4; ++q) x[4 * h + q] = bf16_value(halves[q]);
    }
  }
};

// Lanes in a row share a block: all 32 one of 256, 8 one of 64. With 4 bits a lane's second four elements are
// those that share the bytes of its first four.
template <class Grid>
struct CodedWire : CodedLayout<Grid> {
  static constexpr int32_t kLanes = 32 * Grid::kBlock / static_cast<int32_t>(kWireGroup);
  WSD_DEVICE int32_t block() { return lane_number() / kLanes; }
  WSD_DEVICE int32_t place(int32_t h) {
    return block() * Grid::kBlock + h * (Grid::kBlock / 2) + 4 * (lane_number() % kLanes);
  }
  WSD_DEVICE void encode(const float* x, uint8_t* codes, float* scales) {
    int32_t largest = 0;
    for (int32_t i = 0; i < kPerLane; ++i) largest = larger(largest, magnitude_bits(x[i]));
    for (int32_t lanes = kLanes / 2; lanes > 0; lanes /= 2) {
      largest = larger(largest, __shfl_xor_sync(kAll, largest, lanes));
    }
    if (lane_number() % kLanes == 0) scales[block()] = wire_scale(largest, Grid::kTop);
    const float inverse = wire_inverse(largest, Grid::kTop);
    uint32_t words[2] = {0, 0};
    for (int32_t i = 0; i < kPerLane; ++i) {
      words[i / 4] |= Grid::code(mul(x[i], inverse)) << (8 * (i % 4));
    }
    uint32_t* to = reinterpret_cast<uint32_t*>(codes);
    if constexpr (Grid::kBits == 8) {
      for (int32_t h = 0; h < 2; ++h) to[place(h) / 4] = words[h];
    } else {
      to[lane_number()] = words[0] | words[1] << 4;
    }
  }
  WSD_DEVICE void decode(const uint8_t* codes, const float* scales, float* x) {
    const uint32_t* from = reinterpret_cast<const uint32_t*>(codes);
    const float scale = scales[block()];
    for (int32_t h = 0; h < 2; ++h) {
      const uint32_t word = Grid::kBits == 8 ? from[place(h) / 4] : from[lane_number()] >> (4 * h);
      for (int32_t q = 0; q < 4; ++q) {
        const uint8_t code = static_cast<uint8_t>(word >> (8 * q)) & (Grid::kBits == 8 ? 0xFFu : 0xFu);
        x[4 * h + q] = mul(Grid::level(code), scale);
      }
    }
  }
};

template <class Wire>
WSD_DEVICE void decode_group(const uint8_t* payload, int64_t groups, int64_t g, float* x) {
  const float* scales = reinterpret_cast<const float*>(payload + groups * Wire::kCodeBytes);
  Wire::decode(payload + g * Wire::kCodeBytes, scales + g * Wire::kScales, x);
}

// A lane's eight elements of a group, as far as there are any.
template <class Wire>
WSD_DEVICE void load_group(const float* from, int32_t len, float* x) {
  for (int32_t h = 0; h < 2; ++h) load4(from, Wire::place(h), len, x + 4 * h);
}

template <class Wire>
WSD_DEVICE void store_group(float* to, int32_t len, const float* x) {
  for (int32_t h = 0; h < 2; ++h) store4(to, Wire::place(h), len, x + 4 * h);
}

// out += weight x in the first `len` elements of a group; the largest magnitude of those written.
template <class Wire>
WSD_DEVICE int32_t add_weighted(float* out, int32_t len, const float* x, float weight) {
  float sum[kPerLane];
  load_group<Wire>(out, len, sum);
  int32_t largest = 0;
  for (int32_t i = 0; i < kPerLane; ++i) {
    sum[i] = add(sum[i], mul(weight, x[i]));
    const bool there = Wire::place(i / 4) + i % 4 < len;
    largest = larger(largest, there ? magnitude_bits(sum[i]) : 0);
  }
  store_group<Wire>(out, len, sum);
  return largest;
}

template <class Args>
struct Watched {
  Args args;
  unsigned long long* found;
};

WSD_DEVICE void tell(int32_t largest, unsigned long long* found) {
  if (largest > kLargestGradientBits) *found = 1;  // whoever writes, writes the same
}

template <class Wire>
__global__ void __launch_bounds__(kThreads) encode_kernel(const WireEncode args) {
  float* scales = reinterpret_cast<float*>(args.payload + args.groups * Wire::kCodeBytes);
  const Range range = range_of_warp(args.groups);
  for (int64_t g = range.begin; g < range.end; ++g) {
    float x[kPerLane];
    load_group<Wire>(args.source + g * kWireGroup, kWireGroup, x);
    Wire::encode(x, args.payload + g * Wire::kCodeBytes, scales + g * Wire::kScales);
  }
}

template <class Wire>
__global__ void __launch_bounds__(kThreads) decode_kernel(const WireDecode args) {
  const Range range = range_of_warp(args.groups);
  for (int64_t g = range.begin; g < range.end; ++g) {
    float x[kPerLane];
    decode_group<Wire>(args.payload, args.groups, g, x);
    store_group<Wire>(args.out + g * kWireGroup, kWireGroup, x);
  }
}

template <class Wire>
__global__ void __launch_bounds__(kThreads) accumulate_kernel(const Watched<WireAccumulate> watched) {
  const WireAccumulate& args = watched.args;
  const Range range = range_of_warp(args.groups);
  int32_t largest = 0;
  for (int64_t g = range.begin; g < range.end; ++g) {
    float x[kPerLane];
    decode_group<Wire>(args.payload, args.groups, g, x);
    largest = larger(largest, add_weighted<Wire>(args.out + g * kWireGroup, kWireGroup, x, args.weight));
  }
  tell(largest, watched.found);
}

// A lane reads its part of `source` before it writes the same part of `out`, which may be one.
template <class Wire>
__global__ void __launch_bounds__(kThreads) residual_kernel(const WireResidual args) {
  const Range range = range_of_warp(args.groups);
  for (int64_t g = range.begin; g < range.end; ++g) {
    float x[kPerLane], left[kPerLane];
    load_group<Wire>(args.source + g * kWireGroup, kWireGroup, left);
    decode_group<Wire>(args.payload, args.groups, g, x);
    for (int32_t i = 0; i < kPerLane; ++i) left[i] = sub(left[i], x[i]);
    store_group<Wire>(args.out + g * kWireGroup, kWireGroup, left);
  }
}

template <class Wire>
__global__ void __launch_bounds__(kThreads) segments_kernel(const Watched<WireSegments> watched) {
  const WireSegments& args = watched.args;
  const SegmentView& s = args.segments;
  const Range range = range_of_warp(args.groups);
  int64_t segment = first_segment_after(s, args.start + range.begin * kWireGroup);
  int32_t largest = 0;
  for (int64_t g = range.begin; g < range.end; ++g) {
    const int64_t from = args.start + g * kWireGroup;
    while (segment < s.count && s.offset[segment] + s.numel[segment] <= from) ++segment;
    if (segment == s.count) break;
    if (s.offset[segment] > from) continue;  // padding alone
    const int64_t left = s.offset[segment] + s.numel[segment] - from;
    const int32_t len = static_cast<int32_t>(left < kWireGroup ? left : kWireGroup);
    float x[kPerLane];
    decode_group<Wire>(args.payload, args.groups, g, x);
    const float weight = args.weights[segment];
    largest = larger(largest, add_weighted<Wire>(args.out + g * kWireGroup, len, x, weight));
  }
  tell(largest, watched.found);
}

// See kSquareLanes. The two halves of a warp do the same: a block has no more sums than one half has lanes.
__global__ void __launch_bounds__(kThreads) block_sumsq_kernel(const SegmentSums args) {
  const Range range = range_of_warp(args.segments.num_blocks);
  const int32_t sum_number = lane_number() % kSquareLanes;
  int64_t segment = -1;
  for (int64_t number = range.begin; number < range.end; ++number) {
    const Block b = next_block(args.segments, number, &segment);
    const float* x = args.x + b.at;
    double sum = 0.0;
#pragma unroll
    for (int32_t at = 0; at < kBlock; at += kSquareLanes) {
      const double value = at + sum_number < b.len ? x[at + sum_number] : 0.0f;  // a sum is never -0
      sum += value * value;
    }
    for (int32_t half = kSquareLanes / 2; half > 0; half /= 2) {
      sum += __shfl_xor_sync(kAll, sum, half);  // a + b is b + a: the upper half of the lanes agrees
    }
    if (lane_number() == 0) args.sums[number] = sum;
  }
}

struct SegmentTotals {
  SegmentView segments;
  const double* blocks;
  double* sums;
};

// Block after block: one lane a segment, however long it is. They are few, and their blocks lie in the cache.
__global__ void __launch_bounds__(kThreads) segment_totals_kernel(const SegmentTotals args) {
  const Range range = range_of_warp((args.segments.count + 31) / 32);
  for (int64_t row = range.begin; row < range.end; ++row) {
    const int64_t segment = 32 * row + lane_number();
    if (segment >= args.segments.count) continue;
    double sum = 0.0;
    const int64_t end = args.segments.first_block[segment + 1];
    for (int64_t b = args.segments.first_block[segment]; b < end; ++b) sum += args.blocks[b];
    args.sums[segment] = sum;
  }
}

__global__ void __launch_bounds__(kThreads) scale_kernel(const Watched<SegmentScale> watched) {
  const SegmentScale& args = watched.args;
  const Range range = range_of_warp(args.segments.num_blocks);
  int64_t segment = -1;
  int32_t largest = 0;
  for (int64_t number = range.begin; number < range.end; ++number) {
    const Block b = next_block(args.segments, number, &segment);
    const float factor = args.factors[segment];
    for (int32_t h = 0; h < 2; ++h) {
      float x[4];
      load4(args.x + b.at, place(lane_number(), 4 * h), b.len, x);
      for (int32_t q = 0; q < 4; ++q) {
        const bool there = place(lane_number(), 4 * h) + q < b.len;
        x[q] = mul(x[q], factor);
        largest = larger(largest, there ? magnitude_bits(x[q]) : 0);
      }
      store4(args.x + b.at, place(lane_number(), 4 * h), b.len, x);
    }
  }
  tell(largest, watched.found);
}

// The kernels of all formats, by number.
template <class Args>
using Kernel = void (*)(Args);
#define WSD_ENCODE(Wire) encode_kernel<Wire>,
#define WSD_DECODE(Wire) decode_kernel<Wire>,
#define WSD_ACCUMULATE(Wire) accumulate_kernel<Wire>,
#define WSD_RESIDUAL(Wire) residual_kernel<Wire>,
#define WSD_SEGMENTS(Wire) segments_kernel<Wire>,
const Kernel<WireEncode> kEncode[] = {WSD_WIRES(WSD_ENCODE)};
const Kernel<WireDecode> kDecode[] = {WSD_WIRES(WSD_DECODE)};
const Kernel<Watched<WireAccumulate>> kAccumulate[] = {WSD_WIRES(WSD_ACCUMULATE)};
const Kernel<WireResidual> kResidual[] = {WSD_WIRES(WSD_RESIDUAL)};
const Kernel<Watched<WireSegments>> kSegments[] = {WSD_WIRES(WSD_SEGMENTS)};
#undef WSD_SEGMENTS
#undef WSD_RESIDUAL
#undef WSD_ACCUMULATE
#undef WSD_DECODE
#undef WSD_ENCODE

}  // namespace

const char* wire_encode(int format, const WireEncode& args, int device, cudaStream_t stream) {
  return on_device(kEncode[format], args, args.groups, device, stream);
}

const char* wire_decode(int format, const WireDecode& args, int device, cudaStream_t stream) {
  return on_device(kDecode[format], args, args.groups, device, stream);
}

const char* wire_residual(int format, const WireResidual& args, int device, cudaStream_t stream) {
  return on_device(kResidual[format], args, args.groups, device, stream);
}

const char* wire_accumulate(int format, const WireAccumulate& args, unsigned long long* found, int device,
                            cudaStream_t stream) {
  const Watched<WireAccumulate> watched = {args, found};
  return on_device(kAccumulate[format], watched, args.groups, device, stream, found);
}

const char* wire_accumulate_segments(int format, const WireSegments& args, unsigned long long* found,
                                     int device, cudaStream_t stream) {
  const Watched<WireSegments> watched = {args, found};
  return on_device(kSegments[format], watched, args.groups, device, stream, found);
}

const char* segment_sumsq(const SegmentSums& args, double* sums, int device, cudaStream_t stream) {
  const char* error = on_device(block_sumsq_kernel, args, args.segments.num_blocks, device, stream);
  if (error != nullptr) return error;
  const SegmentTotals totals = {args.segments, args.sums, sums};
  return on_device(segment_totals_kernel, totals, (args.segments.count + 31) / 32, device, stream);
}

const char* scale_segments(const SegmentScale& args, unsigned long long* found, int device,
                           cudaStream_t stream) {
  const Watched<SegmentScale> watched = {args, found};
  return on_device(scale_kernel, watched, args.segments.num_blocks, device, stream, found);
}

}  // namespace wsd::cuda
