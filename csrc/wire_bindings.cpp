// The Python face of the wire formats and of what is done segment by segment. Addresses and counts are
// trusted: megatron_wsd/optim/wire.py has checked them.

#include "bindings.h"

#include <pybind11/stl.h>

namespace wsd {
namespace {

constexpr int64_t kGrainGroups = kGrainElements / kWireGroup;

const cpu::WireKernels& wire(int format) {
  if (format < 0 || format >= kWires) throw std::invalid_argument("no such wire format");
  return chosen->wire[format];
}

std::vector<int64_t> wire_group_bytes() {
  std::vector<int64_t> bytes;
  for (const cpu::WireKernels& kernels : chosen->wire) bytes.push_back(kernels.group_bytes);
  return bytes;
}

void wire_encode(int format, Address source, int64_t groups, Address payload, int threads) {
  const WireEncode args{at<const float>(source), at<uint8_t>(payload), groups};
  all_ranges(wire(format).encode, args, groups, kGrainGroups, threads);
}

void wire_decode(int format, Address payload, int64_t groups, Address out, int threads) {
  const WireDecode args{at<const uint8_t>(payload), at<float>(out), groups};
  all_ranges(wire(format).decode, args, groups, kGrainGroups, threads);
}

bool wire_accumulate(int format, Address payload, int64_t groups, Address out, float weight, int threads) {
  const WireAccumulate args{at<const uint8_t>(payload), at<float>(out), groups, weight};
  return all_ranges(wire(format).accumulate, args, groups, kGrainGroups, threads);
}

void wire_residual(int format, Address payload, int64_t groups, Address source, Address out, int threads) {
  const WireResidual args{at<const uint8_t>(payload), at<const float>(source), at<float>(out), groups};
  all_ranges(wire(format).residual, args, groups, kGrainGroups, threads);
}

// `weights` and `factors` have one entry for every segment that is not empty.
bool wire_accumulate_segments(int format, const Segments& segments, Address payload, int64_t groups,
                              int64_t start, Address out, Address weights, int threads) {
  const WireSegments args{segments.view(), at<const uint8_t>(payload), at<float>(out), groups,
                          start,           at<const float>(weights)};
  return all_ranges(wire(format).accumulate_segments, args, groups, kGrainGroups, threads);
}

// One sum for every segment that is not empty: block by block in order, whichever thread did the blocks.
void segment_sumsq(const Segments& segments, Address x, Address sums, int threads) {
  const SegmentView view = segments.view();
  std::vector<double> blocks(static_cast<size_t>(view.num_blocks));
  const SegmentSums args{view, at<const float>(x), blocks.data()};
  all_ranges(chosen->block_sumsq, args, view.num_blocks, segments.grain(), threads);
  for (int64_t s = 0; s < view.count; ++s) {
    double sum = 0.0;
    for (int64_t b = view.first_block[s]; b < view.first_block[s + 1]; ++b) sum += blocks[b];
    at<double>(sums)[s] = sum;
  }
}

bool scale_segments(const Segments& segments, Address x, Address factors, int threads) {
  const SegmentScale args{segments.view(), at<float>(x), at<const float>(factors)};
  return all_ranges(chosen->scale_segments, args, args.segments.num_blocks, segments.grain(), threads);
}

}  // namespace

void bind_wire(py::module_& module) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  module.def("wire_group_bytes", &wire_group_bytes);
  module.def("wire_encode", &wire_encode, no_gil);
  module.def("wire_decode", &wire_decode, no_gil);
  module.def("wire_accumulate", &wire_accumulate, no_gil);
  module.def("wire_residual", &wire_residual, no_gil);
  module.def("wire_accumulate_segments", &wire_accumulate_segments, no_gil);
  module.def("segment_sumsq", &segment_sumsq, no_gil);
  module.def("scale_segments", &scale_segments, no_gil);
}

}  // namespace wsd
