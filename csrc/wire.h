// How a contribution travels: as fp32, as bf16, or as small codes with one fp32 scale a block.
//
//   value = level(code) * scale,   scale = largest magnitude of the block / the grid's top level
//
// Rounding is to nearest, ties to the even code, and never random: what is rounded off stays with the sender,
// who adds it to the next contribution. Code 0 is exactly 0.
#pragma once

#include "bf16.h"
#include "portable.h"
#include "segments.h"

namespace wsd {

constexpr int64_t kWireGroup = 256;  // elements; what is encoded is a whole number of groups

// A block whose largest magnitude lies below this is sent as zeros: the inverse of its scale would come near
// overflow, and no update can be told from none at 2^-100. So no scale is ever a denormal.
constexpr int32_t kSmallestWireBits = 0x0D800000;  // 2^-100

// Adding this to a number below 2^22 rounds it to an integer, ties to even, and leaves that, in two's
// complement, in the low bits of the sum.
constexpr float kRoundToInteger = 12582912.0f;  // 1.5 * 2^23

// A grid says what the codes of a block mean.
//   kBits, kBlock      of a code; elements that share a scale
//   kTop               level of the largest code
//   code()             of a number that was divided by the scale; for NaN and Inf any
//   level()            of a code

// -127..127, evenly.
struct Int8Grid {
  static constexpr int32_t kBits = 8;
  static constexpr int32_t kBlock = 256;
  static constexpr float kTop = 127.0f;
  WSD_FN uint32_t code(float x) { return bits_of(add(x, kRoundToInteger)) & 0xFFu; }
  WSD_FN float level(uint8_t code) { return static_cast<float>(static_cast<int8_t>(code)); }
};

// -7..7, evenly.
struct Int4LinearGrid {
  static constexpr int32_t kBits = 4;
  static constexpr int32_t kBlock = 64;
  static constexpr float kTop = 7.0f;
  WSD_FN uint32_t code(float x) { return bits_of(add(x, kRoundToInteger)) & 0xFu; }
  WSD_FN float level(uint8_t code) { return static_cast<float>(static_cast<int32_t>(code ^ 8u) - 8); }
};

// A sign and three bits of exponent (E3M0): 0 and +-1, 2, 4, ..., 64.
struct Int4ExponentGrid {
  static constexpr int32_t kBits = 4;
  static constexpr int32_t kBlock = 64;
  static constexpr float kTop = 64.0f;
  static constexpr uint32_t kHalf = 0x3F000000u;  // bits of 0.5f; code c stands for 2^(c - 1)
  WSD_FN uint32_t code(float x) {
    const uint32_t b = bits_of(x) & 0x7FFFFFFFu;
    // Half-way between two powers of two is a mantissa of one half: rounding it away rounds the exponent.
    const uint32_t exponent = (b + 0x3FFFFFu + ((b >> 23) & 1u)) >> 23;
    int32_t c = static_cast<int32_t>(exponent) - static_cast<int32_t>(kHalf >> 23);
    c = larger(c, b > kHalf ? 1 : 0);  // below 1 the neighbour is 0, not a half
    c = c > 7 ? 7 : c;
    return static_cast<uint32_t>(c) | (c != 0 ? (bits_of(x) >> 28) & 8u : 0u);
  }
  WSD_FN float level(uint8_t code) {
    const uint32_t c = code & 7u;
    return float_of((c != 0 ? kHalf + (c << 23) : 0u) | ((code & 8u) << 28));
  }
};

WSD_FN float wire_scale(int32_t largest_bits, float top) {
  return largest_bits < kSmallestWireBits ? 0.0f : div(float_of(static_cast<uint32_t>(largest_bits)), top);
}

WSD_FN float wire_inverse(int32_t largest_bits, float top) {
  return largest_bits < kSmallestWireBits ? 0.0f : div(top, float_of(static_cast<uint32_t>(largest_bits)));
}

// What a payload holds of a group: its codes, and `kScales` of the scales, which stand behind all codes. A
// device and a processor add to it how they go through memory.
struct Fp32Layout {
  static constexpr int64_t kCodeBytes = 4 * kWireGroup;
  static constexpr int64_t kScales = 0;
};

struct Bf16Layout {
  static constexpr int64_t kCodeBytes = 2 * kWireGroup;
  static constexpr int64_t kScales = 0;
};

// Of 4 bits: byte j of a block holds element j in its low half and element j + kBlock / 2 in its high half,
// so that neighbours stay neighbours in a vector.
template <class Grid>
struct CodedLayout {
  static constexpr int64_t kScales = kWireGroup / Grid::kBlock;
  static constexpr int64_t kBlockBytes = Grid::kBlock * Grid::kBits / 8;
  static constexpr int64_t kCodeBytes = kScales * kBlockBytes;
};

// A wire format's number is its place in this list.
#define WSD_WIRES(use)                                                                \
  use(Fp32Wire) use(Bf16Wire) use(CodedWire<Int8Grid>) use(CodedWire<Int4LinearGrid>) \
      use(CodedWire<Int4ExponentGrid>)
#define WSD_ONE(Wire) +1
constexpr int kWires = 0 WSD_WIRES(WSD_ONE);
#undef WSD_ONE

// What is done with payloads of `groups` groups.
struct WireEncode {
  const float* source;
  uint8_t* payload;
  int64_t groups;
};

struct WireDecode {
  const uint8_t* payload;
  float* out;
  int64_t groups;
};

struct WireAccumulate {
  const uint8_t* payload;
  float* out;
  int64_t groups;
  float weight;
};

struct WireResidual {
  const uint8_t* payload;
  const float* source;
  float* out;  // may be `source`
  int64_t groups;
};

struct WireSegments {
  SegmentView segments;
  const uint8_t* payload;
  float* out;
  int64_t groups;
  int64_t start;         // element of the flat buffer at which payload and `out` begin
  const float* weights;  // of every segment
};

// The sum of squares of a block is that of 16 sums, each of every 16th element in turn, which are added in a
// tree of halves: that is how the widest vectors would do it, and everything else has to follow. Squares of
// floats are exact in double.
constexpr int32_t kSquareLanes = 16;

struct SegmentSums {
  SegmentView segments;
  const float* x;
  double* sums;  // of every block
};

struct SegmentScale {
  SegmentView segments;
  float* x;
  const float* factors;  // of every segment
};

}  // namespace wsd
