// The anchor of a block in a warp: eight elements a lane, read, written and copied.
#pragma once

#include "warp.h"

namespace wsd::cuda {

template <class Anchor>
struct LaneAnchor {
  typename Anchor::Type kept[kPerLane];
  float p[kPerLane];
};

template <class Anchor>
WSD_DEVICE void load_anchor(const Common& c, const Block& b, LaneAnchor<Anchor>* a) {
  const typename Anchor::Type* from = static_cast<const typename Anchor::Type*>(c.anchor) + b.at;
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) load4(from, place(lane_number(), 4 * h), b.len, a->kept + 4 * h);
#pragma unroll
  for (int32_t i = 0; i < kPerLane; ++i) a->p[i] = Anchor::load(a->kept[i]);
}

// Writes the anchor from `p`, and the copy of what was written; what lies beyond the block is 0 in `kept`.
template <class Anchor>
WSD_DEVICE void store_anchor(const Common& c, const Block& b, const Dice& dice, LaneAnchor<Anchor>* a) {
  typename Anchor::Type* to = static_cast<typename Anchor::Type*>(c.anchor) + b.at;
#pragma unroll
  for (int32_t i = 0; i < kPerLane; ++i) {
    const int32_t at = place(lane_number(), i);
    const uint32_t random = Anchor::kRandom ? roll(dice, b, at) : 0u;
    a->kept[i] = at < b.len ? Anchor::store(a->p[i], random) : typename Anchor::Type{0};
  }
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) store4(to, place(lane_number(), 4 * h), b.len, a->kept + 4 * h);
  if (c.copy == nullptr) return;
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
    uint16_t copied[4];
#pragma unroll
    for (int32_t q = 0; q < 4; ++q) copied[q] = bf16_nearest(Anchor::load(a->kept[4 * h + q]));
    store4(c.copy + b.at, place(lane_number(), 4 * h), b.len, copied);
  }
}

}  // namespace wsd::cuda
