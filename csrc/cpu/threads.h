// Threads over contiguous ranges. Plain std::thread, started for one call and joined in it: torch brings an
// OpenMP runtime of its own, and a second one in the process would fight it for cores and break after fork().
#pragma once

#include <cfenv>
#include <system_error>
#include <thread>
#include <vector>

#include "../portable.h"

namespace wsd::cpu {

// Rounding to nearest, denormals kept: torch.set_flush_denormal() must not change a result.
class DefaultFloatingPoint {
 public:
  DefaultFloatingPoint() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatingPoint() { std::fesetenv(&saved_); }
  DefaultFloatingPoint(const DefaultFloatingPoint&) = delete;
  DefaultFloatingPoint& operator=(const DefaultFloatingPoint&) = delete;

 private:
  std::fenv_t saved_;
};

// Calls body(part, begin, end) for at most `threads` parts of [0, n), none smaller than `grain` unless n is.
// The caller's own thread takes the last part, and every part for which the system has no thread left.
template <class Body>
void for_ranges(int64_t n, int64_t grain, int threads, const Body& body) {
  const int64_t most = n / grain > 1 ? n / grain : 1;
  const int64_t parts = threads < most ? threads : most;
  const auto run = [&](int64_t part) {
    DefaultFloatingPoint environment;
    // Computed without a product that could pass 2^63.
    const int64_t share = n / parts;
    const int64_t extra = n % parts;
    const int64_t begin = part * share + (part < extra ? part : extra);
    body(static_cast<int>(part), begin, begin + share + (part < extra ? 1 : 0));
  };
  std::vector<std::thread> workers;
  workers.reserve(static_cast<size_t>(parts));
  int64_t part = 0;
  try {
    for (; part + 1 < parts; ++part) workers.emplace_back(run, part);
  } catch (const std::system_error&) {
  }
  for (; part < parts; ++part) run(part);
  for (std::thread& worker : workers) worker.join();
}

}  // namespace wsd::cpu
