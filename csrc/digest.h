// A 64-bit digest of memory: the sum, modulo 2^64, of a mixed word for every 8 bytes. A sum does not care in
// which order threads add to it; the position and the salt enter each word's mixing, so moved, swapped or
// changed bytes change the digest. It detects faults, not adversaries. Words are read as little-endian.
#pragma once

#include "counter_hash.h"

namespace wsd {

WSD_FN uint64_t digest_word(uint64_t word, uint64_t position, uint64_t salt) {
  return mix64(word ^ (salt + (position + 1) * kGolden)) * (2 * position + 1);
}

WSD_FN uint64_t digest_finish(uint64_t sum, uint64_t num_bytes, uint64_t salt) {
  return mix64(sum + mix64(num_bytes ^ mix64(salt)));
}

}  // namespace wsd
