// The Python face of the CUDA steps; the same names and calls as the CPU's. Addresses are of the device and
// are trusted: megatron_wsd/optim/native.py has checked device, dtype, contiguity, size and aliasing.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "step.h"

namespace py = pybind11;

namespace wsd::cuda {
namespace {

using Address = std::uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

void check(const char* error) {
  if (error != nullptr) throw std::runtime_error(std::string("CUDA: ") + error);
}

// A segment table whose columns lie on a device, as the CPU extension's columns() orders them.
struct Segments {
  int device;
  int64_t num_blocks;
  int64_t count;
  std::vector<Address> columns;

  SegmentView view() const {
    if (columns.size() != 5) throw std::invalid_argument("a segment table has five columns");
    return {count,
            num_blocks,
            kBlock,
            at<const int64_t>(columns[0]),
            at<const int64_t>(columns[1]),
            at<const uint64_t>(columns[2]),
            at<const int64_t>(columns[3]),
            at<const int64_t>(columns[4])};
  }
};

struct StepCall {
  Address anchor;
  bool bf16;
  Address grad;
  Address copy;
  std::vector<uint64_t> salts;  // of the digest's columns; none: no digest
  Address digest;
  Address stream;

  Common common(const Segments& segments, const AdamHyper& hyper) const {
    if (salts.size() > kDigestColumns) throw std::invalid_argument("too many columns in a digest");
    Common c = {};
    c.segments = segments.view();
    c.anchor = at<void>(anchor);
    c.bf16 = bf16;
    c.grad = at<const float>(grad);
    c.copy = at<uint16_t>(copy);
    c.digest = salts.empty() ? nullptr : at<unsigned long long>(digest);
    std::copy(salts.begin(), salts.end(), c.salt);
    c.seed = hyper.seed;
    c.version = static_cast<uint64_t>(hyper.step);
    c.constants = adam_constants(hyper);
    return c;
  }
};

void cgad_step8(const Segments& segments, const StepCall& call, int codec,
                const std::tuple<Address, Address, Address, Address>& state, const AdamHyper& hyper) {
  if (codec != 0) throw std::invalid_argument("only the ratio codec runs on a CUDA device");
  const auto [a_codes, b_codes, a_scale, b_scale] = state;
  const Step8 args = {call.common(segments, hyper),
                      {at<uint8_t>(a_codes), at<uint8_t>(b_codes), at<float>(a_scale), at<float>(b_scale)}};
  check(launch(args, segments.device, at<CUstream_st>(call.stream)));
}

void cgad_step32(const Segments& segments, const StepCall& call, Address m, Address v,
                 const AdamHyper& hyper) {
  const Step32 args = {call.common(segments, hyper), at<float>(m), at<float>(v)};
  check(launch(args, segments.device, at<CUstream_st>(call.stream)));
}

void gradient_flaws(const Segments& segments, Address grad, Address found, Address stream) {
  const Flaws args = {segments.view(), at<const float>(grad), at<unsigned long long>(found)};
  check(launch(args, segments.device, at<CUstream_st>(stream)));
}

}  // namespace

PYBIND11_MODULE(_CUDA, module) {
  module.doc() = "CUDA kernels of megatron_wsd; call them through megatron_wsd.optim.native.";

  py::class_<Segments>(module, "Segments")
      .def(py::init<int, int64_t, int64_t, std::vector<Address>>(), py::kw_only(), py::arg("device"),
           py::arg("num_blocks"), py::arg("count"), py::arg("columns"));

  py::class_<AdamHyper>(module, "AdamHyper", py::module_local())
      .def(py::init<double, double, double, double, double, double, int64_t, uint64_t>(), py::kw_only(),
           py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"), py::arg("weight_decay"),
           py::arg("gate"), py::arg("step"), py::arg("seed"));

  py::class_<StepCall>(module, "StepCall", py::module_local())
      .def(py::init<Address, bool, Address, Address, std::vector<uint64_t>, Address, Address>(),
           py::kw_only(), py::arg("anchor"), py::arg("bf16"), py::arg("grad"), py::arg("copy"),
           py::arg("salts"), py::arg("digest"), py::arg("stream"));

  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  module.def("cgad_step8", &cgad_step8, no_gil);
  module.def("cgad_step32", &cgad_step32, no_gil);
  module.def("gradient_flaws", &gradient_flaws, no_gil);
}

}  // namespace wsd::cuda
