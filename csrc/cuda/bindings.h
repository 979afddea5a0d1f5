// What the parts of the Python face of the CUDA kernels share.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "../segments.h"
#include "step.h"

namespace wsd::cuda {

namespace py = pybind11;

using Address = std::uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

inline void check(const char* error) {
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

void bind_wire(py::module_& module);

}  // namespace wsd::cuda
