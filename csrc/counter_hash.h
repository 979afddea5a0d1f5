// Counter-based randomness: a pure function of (seed, parameter, element within the parameter, version).
//
// Nothing about threads, shards or devices enters, so a resumed run, or the same parameter cut differently
// over ranks, draws the same numbers.
#pragma once

#include "portable.h"

namespace wsd {

// The finaliser of splitmix64 (Steele, Lea, Flood 2014): a bijection in which every input bit reaches every
// output bit.
WSD_FN uint64_t mix64(uint64_t x) {
  x ^= x >> 30;
  x *= 0xBF58476D1CE4E5B9ull;
  x ^= x >> 27;
  x *= 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

constexpr uint64_t kGolden =
    0x9E3779B97F4A7C15ull;  // 2^64 / golden ratio, odd: steps of it visit every value

// Roundings that must not be correlated draw from different streams.
enum class Stream : uint64_t { kMoments = 0, kAnchor = 0xA54FF53A5F1D36F1ull };

struct Counter {
  uint32_t shift;  // added to the element index
  uint32_t twist;  // enters half-way, so that two counters are not shifted copies of one sequence
};

// What the numbers of one parameter, version and stream have in common.
WSD_FN uint64_t counter_base(Stream stream, uint64_t seed, uint64_t key, uint64_t version) {
  uint64_t k = mix64((seed ^ static_cast<uint64_t>(stream)) + kGolden);
  k = mix64((k ^ key) + kGolden);
  return mix64((k ^ version) + kGolden);
}

WSD_FN Counter make_counter(uint64_t base, uint64_t element_high) {
  const uint64_t k = mix64((base ^ element_high) + kGolden);
  return Counter{static_cast<uint32_t>(k), static_cast<uint32_t>(k >> 32)};
}

// 32 uniform bits for the element whose index has these low 32 bits ("lowbias32", C. Wellons).
WSD_FN uint32_t draw(Counter counter, uint32_t element_low) {
  uint32_t x = element_low + counter.shift;
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= counter.twist;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  return x ^ (x >> 16);
}

}  // namespace wsd
