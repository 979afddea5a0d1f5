// One warp a block of 256: decode, Adam, the new scales by one reduction each, encode. The arithmetic is that
// of the headers that the CPU uses; here are only the ways of a warp through memory.

#include "step.h"

#include "../codec.h"
#include "lane_anchor.h"
#include "launch.h"

namespace wsd::cuda {
namespace {

template <class Codec, class Anchor>
__global__ void __launch_bounds__(kThreads) step8_kernel(const Step8 args) {
  const Common& c = args.common;
  const AdamConstants& k = args.constants;
  const CodecContext context = {k.beta1, k.eps_before, k.eps, nullptr};
  const int32_t lane = lane_number();
  const Range range = range_of_warp(c.segments.num_blocks);
  Dice moments = {0, {0, 0}, -1, 0};
  Dice anchors = {0, {0, 0}, -1, 0};
  int64_t segment = -1;
  uint64_t digest = 0;
  for (int64_t number = range.begin; number < range.end; ++number) {
    const Block b = next_block(c.segments, number, &segment);
    turn(&moments, Stream::kMoments, c, segment, b);
    if (Anchor::kRandom) turn(&anchors, Stream::kAnchor, c, segment, b);

    LaneAnchor<Anchor> anchor;
    load_anchor<Anchor>(c, b, &anchor);
    float grad[kPerLane];
    uint32_t a_codes[2], b_codes[2];
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      const int32_t at = place(lane, 4 * h);
      load4(c.grad + b.at, at, b.len, grad + 4 * h);
      a_codes[h] = load_codes(args.state.a_codes + b.at, at, b.len);
      b_codes[h] = load_codes(args.state.b_codes + b.at, at, b.len);
    }
    const typename Codec::Decoder decoder = Codec::decoder(
        args.state.a_scale[b.scale], args.state.b_scale[b.scale], k.beta1, k.eps_before, context);

    Stored kept[kPerLane];
    uint32_t a_largest = 0;
    uint32_t b_largest = 0;
#pragma unroll
    for (int32_t i = 0; i < kPerLane; ++i) {
      const uint32_t shift = 8u * (i % 4);
      const OldMoments old = Codec::decode(decoder, static_cast<uint8_t>(a_codes[i / 4] >> shift),
                                           static_cast<uint8_t>(b_codes[i / 4] >> shift));
      const AdamElement e = adam_element(anchor.p[i], grad[i], old.decayed_m, mul(k.beta2, old.v), k);
      const bool there = place(lane, i) < b.len;
      anchor.p[i] = e.p;
      kept[i] = there ? Codec::stored(e) : Stored{0.0f, 0.0f};
      const uint32_t a_bits = static_cast<uint32_t>(magnitude_bits(kept[i].a));
      const uint32_t b_bits = static_cast<uint32_t>(magnitude_bits(kept[i].b));
      a_largest = a_largest > a_bits ? a_largest : a_bits;
      b_largest = b_largest > b_bits ? b_largest : b_bits;
    }
    store_anchor<Anchor>(c, b, anchors, &anchor);

    const float a_scale = Codec::stored_scale(static_cast<int32_t>(warp_largest(a_largest)));
    const float b_scale = Codec::stored_scale(static_cast<int32_t>(warp_largest(b_largest)));
    const typename Codec::Encoder encoder = Codec::encoder(a_scale, b_scale, context);
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      a_codes[h] = 0;
      b_codes[h] = 0;
#pragma unroll
      for (int32_t q = 0; q < 4; ++q) {
        const int32_t i = 4 * h + q;
        const int32_t at = place(lane, i);
        const uint32_t random = Codec::kRandom ? roll(moments, b, at) : 0u;
        const uint32_t a_code = Codec::code_a(Codec::fixed_a(encoder, kept[i].a, random));
        const uint32_t b_code = Codec::code_b(Codec::fixed_b(encoder, kept[i].b, random));
        a_codes[h] |= (at < b.len ? a_code : 0u) << (8 * q);
        b_codes[h] |= (at < b.len ? b_code : 0u) << (8 * q);
      }
      store_codes(args.state.a_codes + b.at, place(lane, 4 * h), b.len, a_codes[h]);
      store_codes(args.state.b_codes + b.at, place(lane, 4 * h), b.len, b_codes[h]);
    }
    if (lane == 0) {
      args.state.a_scale[b.scale] = a_scale;
      args.state.b_scale[b.scale] = b_scale;
    }

    if (c.digest != nullptr) {
      const uint64_t bases = lane_digest_base(c, b.scale);
      digest += digest_anchor(anchor.kept, column_base(bases, 0));
      const uint32_t pair = static_cast<uint32_t>(lane);
      digest += digest_pair(a_codes[0], a_codes[1], pair, column_base(bases, 1));
      digest += digest_pair(b_codes[0], b_codes[1], pair, column_base(bases, 2));
      const uint64_t of_scales = digest_pair(bits_of(a_scale), 0, 0, column_base(bases, 3)) +
                                 digest_pair(bits_of(b_scale), 0, 0, column_base(bases, 4));
      if (lane == 0) digest += of_scales;
    }
  }
  if (c.digest != nullptr) add_digest(digest, c.digest);
}

template <class Anchor>
__global__ void __launch_bounds__(kThreads) step32_kernel(const Step32 args) {
  const Common& c = args.common;
  const AdamConstants& k = args.constants;
  const int32_t lane = lane_number();
  const Range range = range_of_warp(c.segments.num_blocks);
  Dice anchors = {0, {0, 0}, -1, 0};
  int64_t segment = -1;
  uint64_t digest = 0;
  for (int64_t number = range.begin; number < range.end; ++number) {
    const Block b = next_block(c.segments, number, &segment);
    if (Anchor::kRandom) turn(&anchors, Stream::kAnchor, c, segment, b);
    LaneAnchor<Anchor> anchor;
    load_anchor<Anchor>(c, b, &anchor);
    float grad[kPerLane], m[kPerLane], v[kPerLane];
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      const int32_t at = place(lane, 4 * h);
      load4(c.grad + b.at, at, b.len, grad + 4 * h);
      load4(args.m + b.at, at, b.len, m + 4 * h);
      load4(args.v + b.at, at, b.len, v + 4 * h);
    }
#pragma unroll
    for (int32_t i = 0; i < kPerLane; ++i) {
      const AdamElement e = adam_element(anchor.p[i], grad[i], mul(k.beta1, m[i]), mul(k.beta2, v[i]), k);
      const bool there = place(lane, i) < b.len;
      anchor.p[i] = e.p;
      m[i] = there ? e.m : 0.0f;
      v[i] = there ? e.v : 0.0f;
    }
    store_anchor<Anchor>(c, b, anchors, &anchor);
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      store4(args.m + b.at, place(lane, 4 * h), b.len, m + 4 * h);
      store4(args.v + b.at, place(lane, 4 * h), b.len, v + 4 * h);
    }
    if (c.digest != nullptr) {
      const uint64_t bases = lane_digest_base(c, b.scale);
      digest += digest_anchor(anchor.kept, column_base(bases, 0));
      digest += digest_floats(m, column_base(bases, 1));
      digest += digest_floats(v, column_base(bases, 2));
    }
  }
  if (c.digest != nullptr) add_digest(digest, c.digest);
}

__global__ void __launch_bounds__(kThreads) flaws_kernel(const Flaws args) {
  const Range range = range_of_warp(args.segments.num_blocks);
  int64_t segment = -1;
  int32_t largest = 0;
  for (int64_t number = range.begin; number < range.end; ++number) {
    const Block b = next_block(args.segments, number, &segment);
    float x[4];
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      load4(args.grad + b.at, place(lane_number(), 4 * h), b.len, x);
#pragma unroll
      for (int32_t q = 0; q < 4; ++q) largest = larger(largest, magnitude_bits(x[q]));
    }
  }
  if (largest > kLargestGradientBits) *args.found = 1;  // whoever writes, writes the same
}

}  // namespace

const char* launch(const Step8& args, int device, cudaStream_t stream) {
  const auto kernel =
      args.common.bf16 ? step8_kernel<RatioCodec, Bf16Anchor> : step8_kernel<RatioCodec, Fp32Anchor>;
  return on_device(kernel, args, args.common.segments.num_blocks, device, stream);
}

const char* launch(const Step32& args, int device, cudaStream_t stream) {
  const auto kernel = args.common.bf16 ? step32_kernel<Bf16Anchor> : step32_kernel<Fp32Anchor>;
  return on_device(kernel, args, args.common.segments.num_blocks, device, stream);
}

const char* launch(const Flaws& args, int device, cudaStream_t stream) {
  return on_device(flaws_kernel, args, args.segments.num_blocks, device, stream, args.found);
}

}  // namespace wsd::cuda
