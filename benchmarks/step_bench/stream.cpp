// The floor: the byte traffic of an optimizer step with next to no arithmetic. Every buffer keeps its
// content: `mask` is 0, which the compiler cannot know. Built by floor.py for the processor it runs on.
#include <cstdint>
#include <thread>
#include <vector>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kBlock = 256;  // elements a turn, so that all streams advance together

using Word = uint32_t;

// out ^= in & mask over `bytes`, a multiple of 256; `in` may be `out`.
template <bool kBypass>
inline void touch(void* out, const void* in, int64_t bytes, Word mask) {
#if defined(__AVX512F__)
  const __m512i m = _mm512_set1_epi32(static_cast<int>(mask));
  auto* o = static_cast<__m512i*>(out);
  auto* i = static_cast<const __m512i*>(in);
  for (int64_t k = 0; k < bytes / 64; ++k) {
    const __m512i x =
        _mm512_xor_si512(_mm512_loadu_si512(o + k), _mm512_and_si512(_mm512_loadu_si512(i + k), m));
    if (kBypass) {
      _mm512_stream_si512(o + k, x);
    } else {
      _mm512_storeu_si512(o + k, x);
    }
  }
#elif defined(__AVX2__)
  const __m256i m = _mm256_set1_epi32(static_cast<int>(mask));
  auto* o = static_cast<__m256i*>(out);
  auto* i = static_cast<const __m256i*>(in);
  for (int64_t k = 0; k < bytes / 32; ++k) {
    const __m256i x =
        _mm256_xor_si256(_mm256_loadu_si256(o + k), _mm256_and_si256(_mm256_loadu_si256(i + k), m));
    if (kBypass) {
      _mm256_stream_si256(o + k, x);
    } else {
      _mm256_storeu_si256(o + k, x);
    }
  }
#else
  auto* o = static_cast<Word*>(out);
  auto* i = static_cast<const Word*>(in);
  for (int64_t k = 0; k < bytes / 4; ++k) o[k] ^= i[k] & mask;
#endif
}

// p ^= g & mask, and each state ^= itself & mask; element size of a state is `state_bytes`, 1 or 4.
template <bool kBypass>
void pass(char* p, const char* g, char* a, char* b, char* scales, int64_t state_bytes, int64_t begin,
          int64_t end, Word mask) {
  for (int64_t i = begin; i < end; i += kBlock) {
    touch<kBypass>(p + 4 * i, g + 4 * i, 4 * kBlock, mask);
    touch<kBypass>(a + state_bytes * i, a + state_bytes * i, state_bytes * kBlock, mask);
    touch<kBypass>(b + state_bytes * i, b + state_bytes * i, state_bytes * kBlock, mask);
    if (scales != nullptr) {
      auto* pair = reinterpret_cast<Word*>(scales) + 2 * (i / kBlock);
      pair[0] ^= pair[0] & mask;
      pair[1] ^= pair[1] & mask;
    }
  }
}

// Reads `bytes`, a multiple of 64; gives something that depends on all of them.
inline Word read(const void* in, int64_t bytes) {
  auto* words = static_cast<const Word*>(in);
  Word lanes[16] = {};
  for (int64_t k = 0; k < bytes / 64; ++k) {
    for (int64_t j = 0; j < 16; ++j) lanes[j] ^= words[16 * k + j];
  }
  Word all = 0;
  for (const Word lane : lanes) all ^= lane;
  return all;
}

template <bool kBypass>
inline void write(void* out, int64_t bytes, Word value) {
#if defined(__AVX512F__)
  const __m512i v = _mm512_set1_epi32(static_cast<int>(value));
  auto* o = static_cast<__m512i*>(out);
  for (int64_t k = 0; k < bytes / 64; ++k) {
    if (kBypass) {
      _mm512_stream_si512(o + k, v);
    } else {
      _mm512_storeu_si512(o + k, v);
    }
  }
#elif defined(__AVX2__)
  const __m256i v = _mm256_set1_epi32(static_cast<int>(value));
  auto* o = static_cast<__m256i*>(out);
  for (int64_t k = 0; k < bytes / 32; ++k) {
    if (kBypass) {
      _mm256_stream_si256(o + k, v);
    } else {
      _mm256_storeu_si256(o + k, v);
    }
  }
#else
  auto* o = static_cast<Word*>(out);
  for (int64_t k = 0; k < bytes / 4; ++k) o[k] = value;
#endif
}

template <class Work>
void in_threads(int threads, const Work& work) {
  std::vector<std::thread> others;
  for (int part = 1; part < threads; ++part) others.emplace_back(work, part);
  work(0);
  for (std::thread& other : others) other.join();
}

}  // namespace

// Passes over n elements, n a multiple of 256, all buffers aligned to 64 bytes. Each thread makes all its
// passes over its own range, so that starting it costs nothing worth counting. `bypass`: non-temporal stores.
extern "C" void stream(void* p, const void* g, void* a, void* b, void* scales, int64_t state_bytes, int64_t n,
                       int64_t passes, int threads, int bypass, Word mask) {
  const auto work = [&](int64_t part) {
    const int64_t blocks = n / kBlock;
    const int64_t begin = blocks * part / threads * kBlock;
    const int64_t end = blocks * (part + 1) / threads * kBlock;
    for (int64_t k = 0; k < passes; ++k) {
      const auto one = bypass != 0 ? pass<true> : pass<false>;
      one(static_cast<char*>(p), static_cast<const char*>(g), static_cast<char*>(a), static_cast<char*>(b),
          static_cast<char*>(scales), state_bytes, begin, end, mask);
    }
  };
  in_threads(threads, work);
}

// Passes over blocks: reads `in_bytes` of a block and writes `out_bytes`, or rewrites them in place. Both are
// multiples of 64, all buffers aligned to 64 bytes.
extern "C" void transfer(void* out, const void* in, int64_t out_bytes, int64_t in_bytes, int64_t blocks,
                         int64_t passes, int threads, int in_place, int bypass, Word mask) {
  const auto work = [&](int64_t part) {
    const int64_t begin = blocks * part / threads;
    const int64_t end = blocks * (part + 1) / threads;
    for (int64_t k = 0; k < passes; ++k) {
      for (int64_t b = begin; b < end; ++b) {
        char* o = static_cast<char*>(out) + b * out_bytes;
        const Word seen = read(static_cast<const char*>(in) + b * in_bytes, in_bytes) & mask;
        if (in_place != 0) {
          (bypass != 0 ? touch<true> : touch<false>)(o, o, out_bytes, seen);
        } else {
          (bypass != 0 ? write<true> : write<false>)(o, out_bytes, seen);
        }
      }
    }
  };
  in_threads(threads, work);
}
