// The Python face of the kernels. Addresses come as integers and are trusted: megatron_wsd/optim/native.py,
// the only importer, has checked device, dtype, contiguity, size and aliasing.

#include "bindings.h"

#include <pybind11/stl.h>

#include <string>
#include <thread>
#include <tuple>
#include <utility>

#include "counter_hash.h"
#include "digest.h"

namespace wsd {

const cpu::Kernels* chosen = cpu::available_kernels().back();

namespace {

#if defined(__clang__)
constexpr const char* kCompiler = "clang " __clang_version__;
#else
constexpr const char* kCompiler = "gcc " __VERSION__;
#endif

std::string use_isa(const std::string& name) {
  const std::string before = chosen->name;
  std::string known;
  for (const cpu::Kernels* kernels : cpu::available_kernels()) {
    if (name == kernels->name) {
      chosen = kernels;
      return before;
    }
    known += (known.empty() ? "" : ", ") + std::string(kernels->name);
  }
  throw std::invalid_argument("instruction set '" + name +
                              "' is not among those this processor has: " + known);
}

int checked_codec(int codec) {
  if (codec < 0 || codec >= kCodecs) throw std::invalid_argument("no such codec");
  return codec;
}

template <class Args>
uint64_t sum_blocks(cpu::Kernel<Args, uint64_t> kernel, const Args& args, int64_t grain, int threads) {
  std::atomic<uint64_t> sum{0};
  cpu::for_ranges(args.segments.num_blocks, grain, threads,
                  [&](int, int64_t begin, int64_t end) { sum += kernel(args, begin, end); });
  return sum;
}

bool gradient_ok(const Segments& segments, Address grad, int threads) {
  const cpu::GradientCheck args{segments.view(), at<const float>(grad)};
  return all_ranges(chosen->gradient_check, args, args.segments.num_blocks, segments.grain(), threads);
}

using Coded = std::tuple<Address, Address, Address, Address>;  // codes a, codes b, scales a, scales b

CodedState coded_state(const Coded& c) {
  return {at<uint8_t>(std::get<0>(c)), at<uint8_t>(std::get<1>(c)), at<float>(std::get<2>(c)),
          at<float>(std::get<3>(c))};
}

using Columns = std::vector<std::tuple<Address, int, bool, uint64_t>>;  // address, width, per block, salt

DigestColumns digest_columns(const Columns& columns) {
  if (columns.size() > kMaxColumns) throw std::invalid_argument("too many columns in a digest");
  DigestColumns made{static_cast<int32_t>(columns.size()), {}};
  for (size_t i = 0; i < columns.size(); ++i) {
    const auto& [address, width, per_block, salt] = columns[i];
    made.column[i] = {at<const unsigned char>(address), width, per_block, salt};
  }
  return made;
}

// What every step takes beside its own buffers.
struct StepCall {
  Address anchor;
  bool bf16;
  Address grad;
  Address copy;  // bf16 copy of the new anchor, or 0
  Columns columns;
  int threads;

  cpu::AnchorNumber number() const { return bf16 ? cpu::kBf16 : cpu::kFp32; }
  cpu::Extras extras() const { return {at<uint16_t>(copy), digest_columns(columns)}; }
};

uint64_t cgad_step8(const Segments& segments, const StepCall& call, int codec, const Coded& state,
                    const AdamHyper& hyper) {
  const cpu::Step8 args{segments.view(),
                        at<void>(call.anchor),
                        at<const float>(call.grad),
                        coded_state(state),
                        adam_constants(hyper),
                        hyper.seed,
                        static_cast<uint64_t>(hyper.step),
                        &dynamic_tables(),
                        call.extras()};
  return sum_blocks(chosen->step8[checked_codec(codec)][call.number()], args, segments.grain(), call.threads);
}

uint64_t cgad_step32(const Segments& segments, const StepCall& call, Address m, Address v,
                     const AdamHyper& hyper) {
  const cpu::Step32 args{segments.view(),
                         at<void>(call.anchor),
                         at<const float>(call.grad),
                         at<float>(m),
                         at<float>(v),
                         adam_constants(hyper),
                         hyper.seed,
                         static_cast<uint64_t>(hyper.step),
                         call.extras()};
  return sum_blocks(chosen->step32[call.number()], args, segments.grain(), call.threads);
}

uint64_t sgd_step(const Segments& segments, const StepCall& call, Address buffer, const SgdHyper& hyper) {
  const cpu::SgdStep args{segments.view(),
                          at<void>(call.anchor),
                          at<const float>(call.grad),
                          at<float>(buffer),
                          sgd_constants(hyper),
                          hyper.seed,
                          static_cast<uint64_t>(hyper.step),
                          call.extras()};
  return sum_blocks(chosen->sgd[call.number()], args, segments.grain(), call.threads);
}

using Kept = std::pair<Address, Address>;  // values, scales; scales are 0 for fp32

uint64_t momentum_step(const Segments& segments, const StepCall& call, const Kept& momentum,
                       const Kept& buffer, const MomentumHyper& hyper) {
  const auto kept = [](const Kept& k) { return KeptVector{at<void>(k.first), at<float>(k.second)}; };
  const cpu::MomentumStep args{segments.view(),
                               at<void>(call.anchor),
                               at<const float>(call.grad),
                               kept(momentum),
                               kept(buffer),
                               momentum_constants(hyper),
                               hyper.seed,
                               static_cast<uint64_t>(hyper.step),
                               call.extras()};
  const auto& kernels = momentum.second ? chosen->momentum8 : chosen->momentum;
  return sum_blocks(kernels[call.number()], args, segments.grain(), call.threads);
}

// The eps of the codec is that of the step which encodes: eps sqrt(1 - beta2^step).
cpu::Moments8 moments8(const Segments& segments, const Coded& state, Address m, Address v,
                       const AdamHyper& hyper) {
  return {segments.view(),
          at<float>(m),
          at<float>(v),
          adam_constants(hyper).eps,
          coded_state(state),
          hyper.seed,
          static_cast<uint64_t>(hyper.step),
          &dynamic_tables()};
}

void decode8(const Segments& segments, int codec, const Coded& state, const AdamHyper& hyper, Address m,
             Address v, int threads) {
  const cpu::Moments8 args = moments8(segments, state, m, v, hyper);
  sum_blocks(chosen->decode8[checked_codec(codec)], args, segments.grain(), threads);
}

void encode8(const Segments& segments, int codec, Address m, Address v, const AdamHyper& hyper,
             const Coded& state, int threads) {
  const cpu::Moments8 args = moments8(segments, state, m, v, hyper);
  sum_blocks(chosen->encode8[checked_codec(codec)], args, segments.grain(), threads);
}

uint64_t digest_flat(const Segments& segments, const Columns& columns, int threads) {
  const cpu::BlockDigest args{segments.view(), digest_columns(columns)};
  return sum_blocks(chosen->digest_blocks, args, segments.grain(), threads);
}

bool all_finite(Address x, int64_t n, int threads) {
  return all_ranges(chosen->finite_check, cpu::FiniteCheck{at<const float>(x)}, n, kGrainElements, threads);
}

bool accumulate(Address out, Address x, int64_t n, float weight, int threads) {
  const cpu::Accumulate args{at<float>(out), at<const float>(x), weight};
  return all_ranges(chosen->accumulate, args, n, kGrainElements, threads);
}

uint64_t digest64(Address address, int64_t num_bytes, uint64_t salt, int threads) {
  const cpu::Digest args{at<const unsigned char>(address), num_bytes, array_salt(salt)};
  std::atomic<uint64_t> sum{0};
  cpu::for_ranges(digest_runs(num_bytes), kGrainElements * 4 / kDigestRun, threads,
                  [&](int, int64_t begin, int64_t end) { sum += chosen->digest(args, begin, end); });
  return digest_finish(sum, static_cast<uint64_t>(num_bytes), args.salt);
}

std::vector<float> dynamic_map(bool is_signed) {
  const float* map = is_signed ? dynamic_tables().signed_map : dynamic_tables().unsigned_map;
  return {map, map + kMapSize};
}

py::dict build_info() {
  std::vector<std::string> names;
  for (const cpu::Kernels* kernels : cpu::available_kernels()) names.emplace_back(kernels->name);
  py::dict info;
  info["isa"] = chosen->name;
  info["isa_available"] = names;
  info["threads"] = static_cast<int>(std::thread::hardware_concurrency());
  info["compiler"] = kCompiler;
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "Native kernels of megatron_wsd; call them through megatron_wsd.optim.native.";

  py::class_<Segments>(module, "Segments")
      .def(py::init<const Segments::Array<int64_t>&, const Segments::Array<int64_t>&,
                    const Segments::Array<uint64_t>&, const Segments::Array<int64_t>&, int64_t>(),
           py::arg("offset").noconvert(), py::arg("numel").noconvert(), py::arg("key").noconvert(),
           py::arg("element0").noconvert(), py::arg("block"))
      .def("columns", &Segments::columns);

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

  py::class_<StepCall>(module, "StepCall")
      .def(py::init<Address, bool, Address, Address, Columns, int>(), py::kw_only(), py::arg("anchor"),
           py::arg("bf16"), py::arg("grad"), py::arg("copy"), py::arg("columns"), py::arg("threads"));

  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  module.def("gradient_ok", &gradient_ok, no_gil);
  module.def("cgad_step8", &cgad_step8, no_gil);
  module.def("cgad_step32", &cgad_step32, no_gil);
  module.def("sgd_step", &sgd_step, no_gil);
  module.def("momentum_step", &momentum_step, no_gil);
  module.def("decode8", &decode8, no_gil);
  module.def("encode8", &encode8, no_gil);
  module.def("all_finite", &all_finite, no_gil);
  module.def("accumulate", &accumulate, no_gil);
  module.def("digest_flat", &digest_flat, no_gil);
  module.def("digest64", &digest64, no_gil);
  bind_wire(module);
  module.def("dynamic_map", &dynamic_map);
  module.def("use_isa", &use_isa, "Force an instruction set for the whole process; returns the one before.");
  module.def("build_info", &build_info);
}

}  // namespace wsd
