// SGD, and Nesterov's momentum, also delayed, with its vectors in fp32 or in 8 bits: one warp a block of 256.

#include "../linear_codec.h"
#include "lane_anchor.h"
#include "launch.h"

namespace wsd::cuda {
namespace {

struct PlainVector {
  WSD_DEVICE void load(const KeptVector& kept, const Block& b, float* x) {
    const float* from = static_cast<const float*>(kept.values) + b.at;
    for (int32_t h = 0; h < 2; ++h) load4(from, place(lane_number(), 4 * h), b.len, x + 4 * h);
  }
  WSD_DEVICE void store(const KeptVector& kept, const Block& b, const Dice&, const float* x) {
    float* to = static_cast<float*>(kept.values) + b.at;
    for (int32_t h = 0; h < 2; ++h) store4(to, place(lane_number(), 4 * h), b.len, x + 4 * h);
  }
};

struct LinearVector {
  WSD_DEVICE void load(const KeptVector& kept, const Block& b, float* x) {
    const uint8_t* codes = static_cast<const uint8_t*>(kept.values) + b.at;
    const float factor = LinearCodec::decode_factor(kept.scale[b.scale]);
    for (int32_t h = 0; h < 2; ++h) {
      const uint32_t word = load_codes(codes, place(lane_number(), 4 * h), b.len);
      for (int32_t q = 0; q < 4; ++q) {
        x[4 * h + q] = LinearCodec::decode(factor, static_cast<uint8_t>(word >> (8 * q)));
      }
    }
  }
  WSD_DEVICE void store(const KeptVector& kept, const Block& b, const Dice& dice, const float* x) {
    uint32_t largest = 0;
    for (int32_t i = 0; i < kPerLane; ++i) {
      const uint32_t bits = static_cast<uint32_t>(magnitude_bits(x[i]));
      if (place(lane_number(), i) < b.len && bits > largest) largest = bits;
    }
    const float scale = LinearCodec::stored_scale(static_cast<int32_t>(warp_largest(largest)));
    const float factor = LinearCodec::encode_factor(scale);
    uint8_t* codes = static_cast<uint8_t*>(kept.values) + b.at;
    for (int32_t h = 0; h < 2; ++h) {
      uint32_t word = 0;
      for (int32_t q = 0; q < 4; ++q) {
        const uint32_t random = roll(dice, b, place(lane_number(), 4 * h + q));
        const uint32_t code = LinearCodec::code(LinearCodec::fixed(factor, x[4 * h + q], random));
        word |= code << (8 * q);
      }
      store_codes(codes, place(lane_number(), 4 * h), b.len, word);
    }
    if (lane_number() == 0) kept.scale[b.scale] = scale;
  }
};

template <bool renew, class Vector, class Anchor>
__global__ void __launch_bounds__(kThreads) momentum_kernel(const MomentumStep args) {
  const Common& c = args.common;
  const Range range = range_of_warp(c.segments.num_blocks);
  Dice vectors = {0, {0, 0}, -1, 0};
  Dice anchors = {0, {0, 0}, -1, 0};
  int64_t segment = -1;
  for (int64_t number = range.begin; number < range.end; ++number) {
    const Block b = next_block(c.segments, number, &segment);
    turn(&vectors, Stream::kMoments, c, segment, b);
    if (Anchor::kRandom) turn(&anchors, Stream::kAnchor, c, segment, b);
    LaneAnchor<Anchor> anchor;
    load_anchor<Anchor>(c, b, &anchor);
    float grad[kPerLane];
    float momentum[kPerLane] = {};
    float buffer[kPerLane] = {};
    for (int32_t h = 0; h < 2; ++h) load4(c.grad + b.at, place(lane_number(), 4 * h), b.len, grad + 4 * h);
    if (renew) Vector::load(args.momentum, b, momentum);
    if (args.buffer.values != nullptr) Vector::load(args.buffer, b, buffer);
    for (int32_t i = 0; i < kPerLane; ++i) {
      const MomentumElement e =
          momentum_element<renew>(anchor.p[i], grad[i], momentum[i], buffer[i], args.constants);
      anchor.p[i] = e.p;
      momentum[i] = e.momentum;
      buffer[i] = e.buffer;
    }
    store_anchor<Anchor>(c, b, anchors, &anchor);
    if (renew) Vector::store(args.momentum, b, vectors, momentum);
    if (args.buffer.values != nullptr) Vector::store(args.buffer, b, vectors, buffer);
  }
}

template <class Anchor>
__global__ void __launch_bounds__(kThreads) sgd_kernel(const SgdStep args) {
  const Common& c = args.common;
  const Range range = range_of_warp(c.segments.num_blocks);
  const KeptVector kept = {args.buffer, nullptr};
  Dice anchors = {0, {0, 0}, -1, 0};
  int64_t segment = -1;
  for (int64_t number = range.begin; number < range.end; ++number) {
    const Block b = next_block(c.segments, number, &segment);
    if (Anchor::kRandom) turn(&anchors, Stream::kAnchor, c, segment, b);
    LaneAnchor<Anchor> anchor;
    load_anchor<Anchor>(c, b, &anchor);
    float grad[kPerLane];
    float buffer[kPerLane] = {};
    for (int32_t h = 0; h < 2; ++h) load4(c.grad + b.at, place(lane_number(), 4 * h), b.len, grad + 4 * h);
    if (args.buffer != nullptr) PlainVector::load(kept, b, buffer);
    for (int32_t i = 0; i < kPerLane; ++i) {
      const SgdElement e = sgd_element(anchor.p[i], grad[i], buffer[i], args.constants);
      anchor.p[i] = e.p;
      buffer[i] = e.buffer;
    }
    store_anchor<Anchor>(c, b, anchors, &anchor);
    if (args.buffer != nullptr) PlainVector::store(kept, b, anchors, buffer);
  }
}

using MomentumKernel = void (*)(MomentumStep);

template <bool renew, class Vector>
MomentumKernel momentum_kernel_of(bool bf16) {
  return bf16 ? momentum_kernel<renew, Vector, Bf16Anchor> : momentum_kernel<renew, Vector, Fp32Anchor>;
}

template <class Vector>
MomentumKernel momentum_kernel_of(const MomentumStep& args) {
  const bool bf16 = args.common.bf16;
  return args.constants.renew ? momentum_kernel_of<true, Vector>(bf16)
                              : momentum_kernel_of<false, Vector>(bf16);
}

}  // namespace

const char* launch(const SgdStep& args, int device, cudaStream_t stream) {
  const auto kernel = args.common.bf16 ? sgd_kernel<Bf16Anchor> : sgd_kernel<Fp32Anchor>;
  return on_device(kernel, args, args.common.segments.num_blocks, device, stream);
}

const char* launch(const MomentumStep& args, int device, cudaStream_t stream) {
  const auto kernel = args.momentum.scale != nullptr ? momentum_kernel_of<LinearVector>(args)
                                                     : momentum_kernel_of<PlainVector>(args);
  return on_device(kernel, args, args.common.segments.num_blocks, device, stream);
}

}  // namespace wsd::cuda
