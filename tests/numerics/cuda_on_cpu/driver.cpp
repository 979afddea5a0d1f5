// The real kernel file behind functions that ctypes can call.

#include "cuda/step.cu"

namespace {

// Addresses of the five columns of a segment table, then count and number of blocks.
wsd::SegmentView view(const int64_t* const* columns, int64_t count, int64_t num_blocks) {
  return {count,      num_blocks, wsd::cuda::kBlock,
          columns[0], columns[1], reinterpret_cast<const uint64_t*>(columns[2]),
          columns[3], columns[4]};
}

wsd::cuda::Common common(const wsd::SegmentView& segments, void* anchor, int bf16, const float* grad,
                         uint16_t* copy, unsigned long long* digest, const uint64_t* salt,
                         const double* hyper, int64_t step, uint64_t seed) {
  wsd::cuda::Common c = {};
  c.segments = segments;
  c.anchor = anchor;
  c.bf16 = bf16 != 0;
  c.grad = grad;
  c.copy = copy;
  c.digest = digest;
  std::memcpy(c.salt, salt, sizeof c.salt);
  c.seed = seed;
  c.version = static_cast<uint64_t>(step);
  c.constants = wsd::adam_constants({hyper[0], hyper[1], hyper[2], hyper[3], hyper[4], hyper[5], step, seed});
  return c;
}

}  // namespace

extern "C" {

const char* step8(const int64_t* const* columns, int64_t count, int64_t num_blocks, void* anchor, int bf16,
                  const float* grad, uint16_t* copy, unsigned long long* digest, const uint64_t* salt,
                  const double* hyper, int64_t step, uint64_t seed, uint8_t* a_codes, uint8_t* b_codes,
                  float* a_scale, float* b_scale) {
  return launch(wsd::cuda::Step8{common(view(columns, count, num_blocks), anchor, bf16, grad, copy, digest,
                                        salt, hyper, step, seed),
                                 {a_codes, b_codes, a_scale, b_scale}},
                0, nullptr);
}

const char* step32(const int64_t* const* columns, int64_t count, int64_t num_blocks, void* anchor, int bf16,
                   const float* grad, uint16_t* copy, unsigned long long* digest, const uint64_t* salt,
                   const double* hyper, int64_t step, uint64_t seed, float* m, float* v) {
  return launch(wsd::cuda::Step32{common(view(columns, count, num_blocks), anchor, bf16, grad, copy, digest,
                                         salt, hyper, step, seed),
                                  m, v},
                0, nullptr);
}

const char* flaws(const int64_t* const* columns, int64_t count, int64_t num_blocks, const float* grad,
                  unsigned long long* found, int device) {
  return launch(wsd::cuda::Flaws{view(columns, count, num_blocks), grad, found}, device, nullptr);
}
}
