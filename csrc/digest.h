// A 64-bit digest of memory: the sum, modulo 2^64, of a mixed value for every run of bytes. A sum does not
// care in which order threads add to it; position and salt enter each run, so moved, swapped or changed bytes
// change the digest. It detects faults, not adversaries. Words are read as little-endian.
//
// A run of an even number of 32-bit words is cut in two halves, whose words are paired:
//   x_j = first_j ^ (low(base) + j kStepX),  y_j = second_j ^ (high(base) + j kStepY)
//   sum of  x_j y_j + 2^32 (x_j + 3 y_j),    base = mix64(salt ^ mix64(position + kGolden))
// For a fixed y a term is one-to-one in x and the other way round, so a fault in one word never goes unseen;
// one that changes several words goes unseen with a chance of about 2^-32 and less. The products are of 32
// bits by 32: one instruction for eight or sixteen words on every processor, and no exchange between the
// lanes of a GPU's warp, which hold both halves of a block.
#pragma once

#include "counter_hash.h"
#include "segments.h"

namespace wsd {

constexpr uint32_t kStepX = 0x9E3779B1u;  // odd, so that 2^32 words have keys of their own
constexpr uint32_t kStepY = 0x85EBCA77u;

WSD_FN uint64_t digest_base(uint64_t position, uint64_t salt) {
  return mix64(salt ^ mix64(position + kGolden));
}

WSD_FN uint64_t digest_pair(uint32_t first, uint32_t second, uint32_t j, uint64_t base) {
  const uint32_t x = first ^ (static_cast<uint32_t>(base) + j * kStepX);
  const uint32_t y = second ^ (static_cast<uint32_t>(base >> 32) + j * kStepY);
  return static_cast<uint64_t>(x) * y + (static_cast<uint64_t>(x + 3u * y) << 32);
}

WSD_FN uint64_t digest_finish(uint64_t sum, uint64_t count, uint64_t salt) {
  return mix64(sum + mix64(count ^ mix64(salt)));
}

// One array of a flat state: `width` bytes for every element, or 4 for every block. A block is a run; what
// lies beyond its true elements counts as zeros.
struct DigestColumn {
  const unsigned char* bytes;
  int32_t width;
  bool per_block;
  uint64_t salt;
};

constexpr int32_t kMaxColumns = 5;

struct DigestColumns {
  int32_t count;  // 0: no digest
  DigestColumn column[kMaxColumns];
};

// A plain array is cut into runs of this size, the last filled up with zeros.
constexpr int64_t kDigestRun = 1024;

WSD_FN int64_t digest_runs(int64_t num_bytes) {
  return (num_bytes + kDigestRun - 1) / kDigestRun;
}

WSD_FN uint64_t array_salt(uint64_t salt) {
  return mix64(salt + kGolden);
}

}  // namespace wsd
