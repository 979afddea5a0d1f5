// A flat buffer and the parameter shards that lie in it.
//
// Each segment starts at a multiple of the block size; a block never crosses a segment, and what lies between
// the end of a segment and the next block boundary is padding that no kernel reads or writes.
#pragma once

#include "portable.h"

namespace wsd {

constexpr int32_t kMinBlock = 64;  // powers of two
constexpr int32_t kMaxBlock = 1024;

struct SegmentView {
  int64_t count;               // segments, none of them empty
  int64_t num_blocks;          // over all segments
  int32_t block;               // elements a block
  const int64_t* offset;       // element of the flat buffer at which the segment begins
  const int64_t* numel;        // true elements
  const uint64_t* key;         // identity of the parameter
  const int64_t* element0;     // index, within the parameter, of the segment's first element
  const int64_t* first_block;  // running count of blocks before the segment; count + 1 entries
};

struct Block {
  int64_t at;       // first element in the flat buffer
  int64_t scale;    // index into the scales
  int32_t len;      // true elements, 1 to block
  uint64_t key;     // of the parameter
  int64_t element;  // index of the first element within the parameter
};

WSD_FN int64_t segment_of(const SegmentView& s, int64_t block_number) {
  int64_t low = 0;
  int64_t high = s.count - 1;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (s.first_block[middle] <= block_number) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// The first segment that ends after this element; `count` if none does.
WSD_FN int64_t first_segment_after(const SegmentView& s, int64_t element) {
  int64_t low = 0;
  int64_t high = s.count;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (s.offset[middle] + s.numel[middle] > element) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

WSD_FN Block block_at(const SegmentView& s, int64_t segment, int64_t block_number) {
  const int64_t inside = (block_number - s.first_block[segment]) * s.block;
  const int64_t left = s.numel[segment] - inside;
  Block b;
  b.at = s.offset[segment] + inside;
  b.scale = b.at / s.block;
  b.len = static_cast<int32_t>(left < s.block ? left : s.block);
  b.key = s.key[segment];
  b.element = s.element0[segment] + inside;
  return b;
}

// For a walk over ascending block numbers: `segment` is -1 at first and then kept by the walk.
WSD_FN Block next_block(const SegmentView& s, int64_t block_number, int64_t* segment) {
  if (*segment < 0) *segment = segment_of(s, block_number);
  while (block_number >= s.first_block[*segment + 1]) ++*segment;
  return block_at(s, *segment, block_number);
}

}  // namespace wsd
