// The Python face of the wire on a device; megatron_wsd/optim/wire.py has checked what comes here.

#include "bindings.h"

#include "wire.h"

namespace wsd::cuda {
namespace {

int checked(int format) {
  if (format < 0 || format >= kWires) throw std::invalid_argument("no such wire format");
  return format;
}

void encode(int format, Address source, int64_t groups, Address payload, int device, Address stream) {
  const WireEncode args = {at<const float>(source), at<uint8_t>(payload), groups};
  check(wire_encode(checked(format), args, device, at<CUstream_st>(stream)));
}

void decode(int format, Address payload, int64_t groups, Address out, int device, Address stream) {
  const WireDecode args = {at<const uint8_t>(payload), at<float>(out), groups};
  check(wire_decode(checked(format), args, device, at<CUstream_st>(stream)));
}

void accumulate(int format, Address payload, int64_t groups, Address out, float weight, Address found,
                int device, Address stream) {
  const WireAccumulate args = {at<const uint8_t>(payload), at<float>(out), groups, weight};
  check(
      wire_accumulate(checked(format), args, at<unsigned long long>(found), device, at<CUstream_st>(stream)));
}

void residual(int format, Address payload, int64_t groups, Address source, Address out, int device,
              Address stream) {
  const WireResidual args = {at<const uint8_t>(payload), at<const float>(source), at<float>(out), groups};
  check(wire_residual(checked(format), args, device, at<CUstream_st>(stream)));
}

// `weights` and `factors` have one entry for every segment that is not empty.
void accumulate_segments(int format, const Segments& segments, Address payload, int64_t groups, int64_t start,
                         Address out, Address weights, Address found, int device, Address stream) {
  const WireSegments args = {segments.view(), at<const uint8_t>(payload), at<float>(out), groups,
                             start,           at<const float>(weights)};
  check(wire_accumulate_segments(checked(format), args, at<unsigned long long>(found), device,
                                 at<CUstream_st>(stream)));
}

// `blocks` is room for a number of every block.
void sumsq(const Segments& segments, Address x, Address sums, Address blocks, int device, Address stream) {
  const SegmentSums args = {segments.view(), at<const float>(x), at<double>(blocks)};
  check(segment_sumsq(args, at<double>(sums), device, at<CUstream_st>(stream)));
}

void scale(const Segments& segments, Address x, Address factors, Address found, int device, Address stream) {
  const SegmentScale args = {segments.view(), at<float>(x), at<const float>(factors)};
  check(scale_segments(args, at<unsigned long long>(found), device, at<CUstream_st>(stream)));
}

}  // namespace

void bind_wire(py::module_& module) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  module.def("wire_encode", &encode, no_gil);
  module.def("wire_decode", &decode, no_gil);
  module.def("wire_accumulate", &accumulate, no_gil);
  module.def("wire_residual", &residual, no_gil);
  module.def("wire_accumulate_segments", &accumulate_segments, no_gil);
  module.def("segment_sumsq", &sumsq, no_gil);
  module.def("scale_segments", &scale, no_gil);
}

}  // namespace wsd::cuda
