// The wire on a device as the host sees it: launches on a stream, errors as text. All addresses are of the
// device; those of fp32 numbers are multiples of 16, those of payloads of 16 for fp32, 8 for bf16, else 4.
#pragma once

#include <cuda_runtime.h>

#include "../wire.h"

namespace wsd::cuda {

const char* wire_encode(int format, const WireEncode& args, int device, cudaStream_t stream);
const char* wire_decode(int format, const WireDecode& args, int device, cudaStream_t stream);
const char* wire_residual(int format, const WireResidual& args, int device, cudaStream_t stream);

// `found` becomes 1 if a step cannot take what was written, else 0.
const char* wire_accumulate(int format, const WireAccumulate& args, unsigned long long* found, int device,
                            cudaStream_t stream);
// Blocks of 256, and `start` a multiple of that: a group then lies in one segment at most.
const char* wire_accumulate_segments(int format, const WireSegments& args, unsigned long long* found,
                                     int device, cudaStream_t stream);

// `args.sums` is room for the sum of every block, `sums` is of every segment.
const char* segment_sumsq(const SegmentSums& args, double* sums, int device, cudaStream_t stream);
const char* scale_segments(const SegmentScale& args, unsigned long long* found, int device,
                           cudaStream_t stream);

}  // namespace wsd::cuda
