// The Python face of the CUDA kernels; the same names and calls as the CPU's, but for where they run: last
// come a device and a stream, or a step's call holds them. Addresses are of the device and are trusted:
// megatron_wsd/optim/ has checked device, dtype, contiguity, size and aliasing.

#include "bindings.h"

#include <algorithm>
#include <tuple>
#include <utility>

namespace wsd::cuda {
namespace {

struct StepCall {
  Address anchor;
  bool bf16;
  Address grad;
  Address copy;
  std::vector<uint64_t> salts;  // of the digest's columns; none: no digest
  Address digest;
  Address stream;

  Common common(const Segments& segments, uint64_t seed, int64_t step) const {
    if (salts.size() > kMaxColumns) throw std::invalid_argument("too many columns in a digest");
    Common c = {};
    c.segments = segments.view();
    c.anchor = at<void>(anchor);
    c.bf16 = bf16;
    c.grad = at<const float>(grad);
    c.copy = at<uint16_t>(copy);
    c.digest = salts.empty() ? nullptr : at<unsigned long long>(digest);
    std::copy(salts.begin(), salts.end(), c.salt);
    c.seed = seed;
    c.version = static_cast<uint64_t>(step);
    return c;
  }
};

void cgad_step8(const Segments& segments, const StepCall& call, int codec,
                const std::tuple<Address, Address, Address, Address>& state, const AdamHyper& hyper) {
  if (codec != 0) throw std::invalid_argument("only the ratio codec runs on a CUDA device");
  const auto [a_codes, b_codes, a_scale, b_scale] = state;
  const Step8 args = {call.common(segments, hyper.seed, hyper.step),
                      adam_constants(hyper),
                      {at<uint8_t>(a_codes), at<uint8_t>(b_codes), at<float>(a_scale), at<float>(b_scale)}};
  check(launch(args, segments.device, at<CUstream_st>(call.stream)));
}

void cgad_step32(const Segments& segments, const StepCall& call, Address m, Address v,
                 const AdamHyper& hyper) {
  const Step32 args = {call.common(segments, hyper.seed, hyper.step), adam_constants(hyper), at<float>(m),
                       at<float>(v)};
  check(launch(args, segments.device, at<CUstream_st>(call.stream)));
}

void sgd_step(const Segments& segments, const StepCall& call, Address buffer, const SgdHyper& hyper) {
  const SgdStep args = {call.common(segments, hyper.seed, hyper.step), at<float>(buffer),
                        sgd_constants(hyper)};
  check(launch(args, segments.device, at<CUstream_st>(call.stream)));
}

using Kept = std::pair<Address, Address>;  // values, scales; scales are 0 for fp32

void momentum_step(const Segments& segments, const StepCall& call, const Kept& momentum, const Kept& buffer,
                   const MomentumHyper& hyper) {
  const auto kept = [](const Kept& k) { return KeptVector{at<void>(k.first), at<float>(k.second)}; };
  const MomentumStep args = {call.common(segments, hyper.seed, hyper.step), kept(momentum), kept(buffer),
                             momentum_constants(hyper)};
  check(launch(args, segments.device, at<CUstream_st>(call.stream)));
}

void gradient_flaws(const Segments& segments, Address grad, Address found, int device, Address stream) {
  const Flaws args = {segments.view(), at<const float>(grad), at<unsigned long long>(found)};
  check(launch(args, device, at<CUstream_st>(stream)));
}

using Columns = std::vector<std::tuple<Address, int, bool, uint64_t>>;  // address, width, per block, salt

void digest_flat(const Segments& segments, const Columns& columns, Address sum, int device, Address stream) {
  if (columns.size() > kMaxColumns) throw std::invalid_argument("too many columns in a digest");
  BlockDigest args = {
      segments.view(), {static_cast<int32_t>(columns.size()), {}}, at<unsigned long long>(sum)};
  for (size_t i = 0; i < columns.size(); ++i) {
    const auto& [address, width, per_block, salt] = columns[i];
    if (width != 1 && width != 2 && width != 4) throw std::invalid_argument("a column of another width");
    args.columns.column[i] = {at<const unsigned char>(address), width, per_block, salt};
  }
  check(launch(args, device, at<CUstream_st>(stream)));
}

void digest64(Address bytes, int64_t num_bytes, uint64_t salt, Address sum, int device, Address stream) {
  const Digest args = {at<const unsigned char>(bytes), num_bytes, array_salt(salt),
                       at<unsigned long long>(sum)};
  check(launch(args, device, at<CUstream_st>(stream)));
}

}  // namespace

PYBIND11_MODULE(_CUDA, module) {
  module.doc() = "CUDA kernels of megatron_wsd; call them through megatron_wsd.optim.native.";

  py::class_<Segments>(module, "Segments", py::module_local())
      .def(py::init<int, int64_t, int64_t, std::vector<Address>>(), py::kw_only(), py::arg("device"),
           py::arg("num_blocks"), py::arg("count"), py::arg("columns"));

  py::class_<AdamHyper>(module, "AdamHyper", py::module_local())
      .def(py::init<double, double, double, double, double, double, int64_t, uint64_t>(), py::kw_only(),
           py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"), py::arg("weight_decay"),
           py::arg("gate"), py::arg("step"), py::arg("seed"));

  py::class_<SgdHyper>(module, "SgdHyper", py::module_local())
      .def(py::init<double, double, double, bool, int64_t, uint64_t>(), py::kw_only(), py::arg("lr"),
           py::arg("momentum"), py::arg("weight_decay"), py::arg("nesterov"), py::arg("step"),
           py::arg("seed"));

  py::class_<MomentumHyper>(module, "MomentumHyper", py::module_local())
      .def(py::init<double, double, double, int64_t, int64_t, uint64_t>(), py::kw_only(), py::arg("lr"),
           py::arg("momentum"), py::arg("weight_decay"), py::arg("period"), py::arg("step"), py::arg("seed"));

  py::class_<StepCall>(module, "StepCall", py::module_local())
      .def(py::init<Address, bool, Address, Address, std::vector<uint64_t>, Address, Address>(),
           py::kw_only(), py::arg("anchor"), py::arg("bf16"), py::arg("grad"), py::arg("copy"),
           py::arg("salts"), py::arg("digest"), py::arg("stream"));

  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  module.def("cgad_step8", &cgad_step8, no_gil);
  module.def("cgad_step32", &cgad_step32, no_gil);
  module.def("sgd_step", &sgd_step, no_gil);
  module.def("momentum_step", &momentum_step, no_gil);
  module.def("gradient_flaws", &gradient_flaws, no_gil);
  module.def("digest_flat", &digest_flat, no_gil);
  module.def("digest64", &digest64, no_gil);
  module.def("digest_finish", [](uint64_t sum, int64_t count, uint64_t salt) {
    return digest_finish(sum, static_cast<uint64_t>(count), array_salt(salt));
  });
  bind_wire(module);
}

}  // namespace wsd::cuda
