// What the parts of the Python face share.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <atomic>
#include <stdexcept>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/threads.h"

namespace wsd {

namespace py = pybind11;

using Address = std::uintptr_t;

constexpr int64_t kGrainElements = 1 << 15;  // about 30 us of work: what starting a thread costs

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

extern const cpu::Kernels* chosen;  // the instruction set in use

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
    if (block < kMinBlock || block > kMaxBlock || (block & (block - 1)) != 0) {
      throw std::invalid_argument("block size must be 64, 128, 256, 512 or 1024");
    }
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

  // The same as columns of integers of 64 bits, for a copy on a device.
  std::vector<std::vector<int64_t>> columns() const {
    return {offset_, numel_, {key_.begin(), key_.end()}, element0_, first_block_};
  }

  int64_t grain() const { return kGrainElements / block_; }

 private:
  int64_t block_;
  std::vector<int64_t> offset_, numel_, element0_, first_block_;
  std::vector<uint64_t> key_;
};

template <class Args>
bool all_ranges(cpu::Kernel<Args, bool> kernel, const Args& args, int64_t n, int64_t grain, int threads) {
  std::atomic<bool> good{true};
  cpu::for_ranges(n, grain, threads, [&](int, int64_t begin, int64_t end) {
    if (!kernel(args, begin, end)) good = false;
  });
  return good;
}

void bind_wire(py::module_& module);

}  // namespace wsd
