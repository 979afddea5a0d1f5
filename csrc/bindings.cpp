// The Python face of the kernels. Addresses come as integers and are trusted: megatron_wsd/optim/native.py,
// the only importer, has checked device, dtype, contiguity, size and aliasing.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "counter_hash.h"
#include "cpu/kernels.h"
#include "cpu/threads.h"
#include "digest.h"

namespace py = pybind11;

namespace wsd {
namespace {

using Address = std::uintptr_t;

constexpr int64_t kGrainElements = 1 << 15;  // about 30 us of work: what starting a thread costs

#if defined(__clang__)
constexpr const char* kCompiler = "clang " __clang_version__;
#else
constexpr const char* kCompiler = "gcc " __VERSION__;
#endif

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

const cpu::Kernels* chosen = cpu::available_kernels().back();

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

// The segment table, checked and with its running count of blocks; owns what a SegmentView points to.
class Segments {
 public:
  template <class T>
  using Array = py::array_t<T, py::array::c_style>;

  Segments(const Array<int64_t>& offset, const Array<int64_t>& numel, const Array<uint64_t>& key,
           const Array<int64_t>& element0, int64_t block)
      : block_(block) {
    const py::ssize_t count = offset.size();
    if (numel.size() != count || key.size() != count || element0.size() != count) {
      throw std::invalid_argument("segment columns differ in length");
    }
    if (block < 1 || block > kMaxBlock) throw std::invalid_argument("block size must be 1 to 1024");
    int64_t end = 0;
    first_block_.push_back(0);
    for (py::ssize_t i = 0; i < count; ++i) {
      const int64_t o = offset.data()[i];
      const int64_t n = numel.data()[i];
      if (o < end || o % block != 0) throw std::invalid_argument("segments overlap or are not block-aligned");
      if (n < 0 || element0.data()[i] < 0) throw std::invalid_argument("negative count in a segment");
      if (n == 0) continue;
      end = o + n;
      offset_.push_back(o);
      numel_.push_back(n);
      key_.push_back(key.data()[i]);
      element0_.push_back(element0.data()[i]);
      first_block_.push_back(first_block_.back() + (n + block - 1) / block);
    }
  }

  SegmentView view() const {
    return SegmentView{static_cast<int64_t>(offset_.size()),
                       first_block_.back(),
                       static_cast<int32_t>(block_),
                       offset_.data(),
                       numel_.data(),
                       key_.data(),
                       element0_.data(),
                       first_block_.data()};
  }

  int64_t grain() const { return kGrainElements / block_; }

 private:
  int64_t block_;
  std::vector<int64_t> offset_, numel_, element0_, first_block_;
  std::vector<uint64_t> key_;
};

template <class Args>
void over_blocks(void (*kernel)(const Args&, int64_t, int64_t), const Args& args, int64_t grain,
                 int threads) {
  cpu::for_ranges(args.segments.num_blocks, grain, threads,
                  [&](int, int64_t begin, int64_t end) { kernel(args, begin, end); });
}

template <class Args>
bool all_ranges(bool (*kernel)(const Args&, int64_t, int64_t), const Args& args, int64_t n, int64_t grain,
                int threads) {
  std::atomic<bool> good{true};
  cpu::for_ranges(n, grain, threads, [&](int, int64_t begin, int64_t end) {
    if (!kernel(args, begin, end)) good = false;
  });
  return good;
}

cpu::CodedState coded_state(Address r_codes, Address s_codes, Address r_scale, Address s_scale) {
  return {at<int8_t>(r_codes), at<uint8_t>(s_codes), at<float>(r_scale), at<float>(s_scale)};
}

bool gradient_ok(const Segments& segments, Address grad, int threads) {
  const cpu::GradientCheck args{segments.view(), at<const float>(grad)};
  return all_ranges(chosen->gradient_check, args, args.segments.num_blocks, segments.grain(), threads);
}

void cgad_step8(const Segments& segments, Address anchor, Address grad, Address r_codes, Address s_codes,
                Address r_scale, Address s_scale, const AdamHyper& hyper, int threads) {
  const cpu::Step8 args{segments.view(),
                        at<float>(anchor),
                        at<const float>(grad),
                        coded_state(r_codes, s_codes, r_scale, s_scale),
                        adam_constants(hyper),
                        hyper.seed,
                        static_cast<uint64_t>(hyper.step)};
  over_blocks(chosen->step8, args, segments.grain(), threads);
}

void cgad_step32(const Segments& segments, Address anchor, Address grad, Address m, Address v,
                 const AdamHyper& hyper, int threads) {
  const cpu::Step32 args{segments.view(), at<float>(anchor), at<const float>(grad),
                         at<float>(m),    at<float>(v),      adam_constants(hyper)};
  over_blocks(chosen->step32, args, segments.grain(), threads);
}

void sgd_step(const Segments& segments, Address anchor, Address grad, Address buffer, double lr,
              double momentum, bool nesterov, double weight_decay, int threads) {
  const cpu::SgdStep args{
      segments.view(),
      at<float>(anchor),
      at<const float>(grad),
      at<float>(buffer),
      {static_cast<float>(-lr), static_cast<float>(momentum), static_cast<float>(weight_decay), nesterov}};
  over_blocks(chosen->sgd, args, segments.grain(), threads);
}

// The eps of the codec is that of the step which encodes: eps sqrt(1 - beta2^step).
void decode8(const Segments& segments, Address r_codes, Address s_codes, Address r_scale, Address s_scale,
             const AdamHyper& hyper, Address m, Address v, int threads) {
  const cpu::Decode8 args{segments.view(), coded_state(r_codes, s_codes, r_scale, s_scale),
                          adam_constants(hyper).eps, at<float>(m), at<float>(v)};
  over_blocks(chosen->decode8, args, segments.grain(), threads);
}

void encode8(const Segments& segments, Address m, Address v, const AdamHyper& hyper, Address r_codes,
             Address s_codes, Address r_scale, Address s_scale, int threads) {
  const cpu::Encode8 args{segments.view(),
                          at<const float>(m),
                          at<const float>(v),
                          adam_constants(hyper).eps,
                          coded_state(r_codes, s_codes, r_scale, s_scale),
                          hyper.seed,
                          static_cast<uint64_t>(hyper.step)};
  over_blocks(chosen->encode8, args, segments.grain(), threads);
}

bool all_finite(Address x, int64_t n, int threads) {
  return all_ranges(chosen->finite_check, cpu::FiniteCheck{at<const float>(x)}, n, kGrainElements, threads);
}

void accumulate(Address out, Address x, int64_t n, float weight, int threads) {
  const cpu::Accumulate args{at<float>(out), at<const float>(x), weight};
  cpu::for_ranges(n, kGrainElements, threads,
                  [&](int, int64_t begin, int64_t end) { chosen->accumulate(args, begin, end); });
}

uint64_t digest64(Address address, int64_t num_bytes, uint64_t salt, int threads) {
  const cpu::Digest args{at<const unsigned char>(address), mix64(salt + kGolden)};
  const int64_t words = num_bytes / 8;
  std::atomic<uint64_t> sum{0};
  cpu::for_ranges(words, kGrainElements, threads,
                  [&](int, int64_t begin, int64_t end) { sum += chosen->digest(args, begin, end); });
  uint64_t tail = 0;
  if (num_bytes % 8 != 0) std::memcpy(&tail, args.bytes + 8 * words, static_cast<size_t>(num_bytes % 8));
  return digest_finish(sum + digest_word(tail, static_cast<uint64_t>(words), args.salt),
                       static_cast<uint64_t>(num_bytes), args.salt);
}

py::dict build_info() {
  std::vector<std::string> names;
  for (const cpu::Kernels* kernels : cpu::available_kernels()) names.emplace_back(kernels->name);
  py::dict info;
  info["isa"] = chosen->name;
  info["isa_available"] = names;
  info["threads"] = static_cast<int>(std::thread::hardware_concurrency());
  info["compiler"] = kCompiler;
  info["cuda"] = false;
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "Native kernels of megatron_wsd; call them through megatron_wsd.optim.native.";

  py::class_<Segments>(module, "Segments")
      .def(py::init<const Segments::Array<int64_t>&, const Segments::Array<int64_t>&,
                    const Segments::Array<uint64_t>&, const Segments::Array<int64_t>&, int64_t>(),
           py::arg("offset").noconvert(), py::arg("numel").noconvert(), py::arg("key").noconvert(),
           py::arg("element0").noconvert(), py::arg("block"));

  py::class_<AdamHyper>(module, "AdamHyper")
      .def(py::init<double, double, double, double, double, double, int64_t, uint64_t>(), py::kw_only(),
           py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"), py::arg("weight_decay"),
           py::arg("gate"), py::arg("step"), py::arg("seed"));

  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  module.def("gradient_ok", &gradient_ok, no_gil);
  module.def("cgad_step8", &cgad_step8, no_gil);
  module.def("cgad_step32", &cgad_step32, no_gil);
  module.def("sgd_step", &sgd_step, no_gil);
  module.def("decode8", &decode8, no_gil);
  module.def("encode8", &encode8, no_gil);
  module.def("all_finite", &all_finite, no_gil);
  module.def("accumulate", &accumulate, no_gil);
  module.def("digest64", &digest64, no_gil);
  module.def("use_isa", &use_isa, "Force an instruction set for the whole process; returns the one before.");
  module.def("build_info", &build_info);
}

}  // namespace wsd
