// One copy of the loops per instruction set. The copies differ only in a function attribute, so the file
// needs no special flags and the rest of the extension stays runnable on the oldest processor.

#include "kernels.h"

#include "../anchor.h"
#include "../codec.h"
#include "../counter_hash.h"
#include "../digest.h"

#define WSD_ISA scalar
#define WSD_TARGET
#include "loops.inc"
#undef WSD_ISA
#undef WSD_TARGET

#if defined(__x86_64__)
#define WSD_ISA avx2
#define WSD_TARGET __attribute__((target("avx2")))
#include "loops.inc"
#undef WSD_ISA
#undef WSD_TARGET

#define WSD_ISA avx512
#if defined(__clang__)
#define WSD_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#else
#define WSD_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#endif
#include "loops.inc"
#undef WSD_ISA
#undef WSD_TARGET
#endif

namespace wsd::cpu {

std::vector<const Kernels*> available_kernels() {
  std::vector<const Kernels*> found = {&scalar::kernels};
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2")) found.push_back(&avx2::kernels);
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    found.push_back(&avx512::kernels);
  }
#endif
  return found;
}

}  // namespace wsd::cpu
