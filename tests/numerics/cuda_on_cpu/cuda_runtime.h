// Stands in for CUDA's header of the same name, so that a C++ compiler can build and run the real kernel
// file.
//
// A warp runs as 32 fibers in lockstep: each runs until its next collective, and when all 32 have arrived
// they read each other's values and go on. Warps run one after the other, so a kernel must not wait for
// another warp. A collective that some lanes do not reach ends the process: on a GPU it would hang or read
// garbage.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(threads)

struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
inline float4 make_float4(float x, float y, float z, float w) {
  return {x, y, z, w};
}
inline uint2 make_uint2(uint32_t x, uint32_t y) {
  return {x, y};
}
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1) : x(x_), y(1), z(1) {}
};

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
struct CUstream_st;
using cudaStream_t = CUstream_st*;
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};

namespace on_cpu {

constexpr int kLanes = 32;
constexpr size_t kStack = 1 << 17;
constexpr int kProcessors = 2;  // few, so that every warp walks over several blocks

struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(kStack);
  uint64_t given = 0;
  bool done = false;
};

inline std::mutex one_kernel;  // what follows is of the one that runs
inline Fiber fibers[kLanes];
inline ucontext_t scheduler;
inline int current = 0;
inline unsigned thread_base = 0;
inline std::function<void()> body;

struct Thread {
  unsigned x;
};
inline Thread thread_index() {
  return {thread_base + static_cast<unsigned>(current)};
}

inline void fiber_main() {
  body();
  fibers[current].done = true;
  swapcontext(&fibers[current].context, &scheduler);
}

inline void wait_for_all() {
  swapcontext(&fibers[current].context, &scheduler);
}

// The bits of a value of at most 64.
template <class T>
uint64_t bits(T value) {
  uint64_t found = 0;
  std::memcpy(&found, &value, sizeof value);
  return found;
}
template <class T>
T value_of(uint64_t bits) {
  T found;
  std::memcpy(&found, &bits, sizeof found);
  return found;
}

// Gives a value, waits for all lanes, and reads what others gave.
inline uint64_t exchange(uint64_t value, const std::function<uint64_t()>& read) {
  fibers[current].given = value;
  wait_for_all();
  const uint64_t found = read();
  wait_for_all();  // nobody gives anew before all have read
  return found;
}

inline void run_warp() {
  for (current = 0; current < kLanes; ++current) {
    Fiber& f = fibers[current];
    f.done = false;
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.data();
    f.context.uc_stack.ss_size = f.stack.size();
    f.context.uc_link = &scheduler;
    makecontext(&f.context, fiber_main, 0);
  }
  for (int running = kLanes; running > 0;) {
    running = 0;
    for (current = 0; current < kLanes; ++current) {
      if (fibers[current].done) continue;
      swapcontext(&scheduler, &fibers[current].context);
      running += !fibers[current].done;
    }
    if (running != 0 && running != kLanes) {
      std::fprintf(stderr, "only %d lanes reached a collective\n", running);
      std::abort();
    }
  }
}

}  // namespace on_cpu

#define threadIdx (on_cpu::thread_index())
inline dim3 blockIdx, blockDim, gridDim;

template <class T>
T __shfl_xor_sync(unsigned, T value, int lanes) {
  const int from = on_cpu::current ^ lanes;
  return on_cpu::value_of<T>(
      on_cpu::exchange(on_cpu::bits(value), [from] { return on_cpu::fibers[from].given; }));
}
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return on_cpu::value_of<T>(
      on_cpu::exchange(on_cpu::bits(value), [lane] { return on_cpu::fibers[lane].given; }));
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  return static_cast<unsigned>(on_cpu::exchange(value, [] {
    uint64_t most = 0;
    for (const on_cpu::Fiber& f : on_cpu::fibers) most = f.given > most ? f.given : most;
    return most;
  }));
}
inline unsigned long long atomicAdd(unsigned long long* at, unsigned long long value) {
  const unsigned long long before = *at;
  *at += value;
  return before;
}

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int device) {
  return device == 0 ? cudaSuccess : cudaErrorInvalidValue;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = on_cpu::kProcessors;
  return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, size_t) {
  *blocks = 1;
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "invalid argument";
}
template <class Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Args), const Args& args) {
  const std::lock_guard<std::mutex> alone(on_cpu::one_kernel);
  blockDim = config->blockDim;
  gridDim = config->gridDim;
  on_cpu::body = [&] { kernel(args); };
  for (unsigned block = 0; block < config->gridDim.x; ++block) {
    blockIdx.x = block;
    for (unsigned warp = 0; warp < config->blockDim.x / on_cpu::kLanes; ++warp) {
      on_cpu::thread_base = warp * on_cpu::kLanes;
      on_cpu::run_warp();
    }
  }
  return cudaSuccess;
}
