// How every kernel is launched.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace wsd::cuda {

constexpr unsigned kThreads = 256;

// As many warps as keep the device busy, each with several of `units` to walk.
template <class Args>
static cudaError_t launch_warps(void (*kernel)(Args), const Args& args, int64_t units, int device,
                                cudaStream_t stream) {
  int processors = 0;
  int resident = 0;
  cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, kThreads, 0);
  }
  if (error != cudaSuccess) return error;
  const int64_t warps_a_group = kThreads / 32;
  const int64_t wanted = (units + warps_a_group - 1) / warps_a_group;
  const int64_t most = int64_t{4} * processors * (resident > 0 ? resident : 1);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(wanted < most ? wanted : most));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  error = cudaLaunchKernelEx(&config, kernel, args);
  return error == cudaSuccess ? cudaGetLastError() : error;
}

// Sets `found`, if it is given, to 0 and launches `kernel`, on `stream` of `device`; whichever device was the
// current one is again afterwards. Null, or what CUDA says is wrong.
template <class Args>
static const char* on_device(void (*kernel)(Args), const Args& args, int64_t units, int device,
                             cudaStream_t stream, unsigned long long* found = nullptr) {
  if (units == 0 && found == nullptr) return nullptr;
  int before = 0;
  cudaError_t error = cudaGetDevice(&before);
  if (error == cudaSuccess && before != device) error = cudaSetDevice(device);
  if (error == cudaSuccess && found != nullptr) error = cudaMemsetAsync(found, 0, sizeof *found, stream);
  if (error == cudaSuccess && units != 0) error = launch_warps(kernel, args, units, device, stream);
  if (before != device) {
    const cudaError_t restored = cudaSetDevice(before);
    if (error == cudaSuccess) error = restored;
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace wsd::cuda
