// What lets one piece of arithmetic compile for host and device and give the same bits on both.
//
// Every floating-point operation of this project is one correctly rounded IEEE-754 operation (add, sub, mul,
// div, sqrt), never contracted into a fused one: on the host the build passes -ffp-contract=off, on the
// device the intrinsics below forbid contraction. Vectorising such code cannot change its result, so every
// instruction set, thread count and device agrees bit for bit.
#pragma once

#include <cmath>
#include <cstdint>

#if defined(__CUDACC__)
#define WSD_FN static __host__ __device__ __forceinline__
#else
#define WSD_FN static inline __attribute__((always_inline))
#endif

namespace wsd {

#if defined(__CUDA_ARCH__)
WSD_FN float add(float a, float b) {
  return __fadd_rn(a, b);
}
WSD_FN float sub(float a, float b) {
  return __fsub_rn(a, b);
}
WSD_FN float mul(float a, float b) {
  return __fmul_rn(a, b);
}
WSD_FN float div(float a, float b) {
  return __fdiv_rn(a, b);
}
WSD_FN float root(float a) {
  return __fsqrt_rn(a);
}
WSD_FN uint32_t bits_of(float f) {
  return __float_as_uint(f);
}
WSD_FN float float_of(uint32_t u) {
  return __uint_as_float(u);
}
#else
WSD_FN float add(float a, float b) {
  return a + b;
}
WSD_FN float sub(float a, float b) {
  return a - b;
}
WSD_FN float mul(float a, float b) {
  return a * b;
}
WSD_FN float div(float a, float b) {
  return a / b;
}
WSD_FN float root(float a) {
  return ::sqrtf(a);
}
WSD_FN uint32_t bits_of(float f) {
  uint32_t u;
  __builtin_memcpy(&u, &f, sizeof u);
  return u;
}
WSD_FN float float_of(uint32_t u) {
  float f;
  __builtin_memcpy(&f, &u, sizeof f);
  return f;
}
#endif

// Magnitudes of floats order like the integers of their bits. Signed, because SSE2 has no unsigned maximum.
WSD_FN int32_t magnitude_bits(float f) {
  return static_cast<int32_t>(bits_of(f) & 0x7FFFFFFFu);
}

WSD_FN int32_t larger(int32_t a, int32_t b) {
  return a > b ? a : b;
}

// 2^63: the largest gradient whose square, and any average of such squares, is still finite in fp32.
constexpr int32_t kLargestGradientBits = 0x5F000000;
constexpr int32_t kInfinityBits = 0x7F800000;

}  // namespace wsd
