// Moves bytes at a limited rate, so that the steps beside it keep theirs: a copy at full rate takes the memory's whole
// bandwidth.
#pragma once
#include <chrono>
#include <cstdint>
#include <functional>
#include <vector>

#include "cuda/scatter/scatter.h"

namespace refit::cuda {

// Used by one thread at a time.
class Pace {
 public:
  // Bytes per second; 0: no limit.
  explicit Pace(double rate) : rate_(rate) {}

  bool limited() const { return rate_ > 0; }
  // Sleeps until `bytes` more may move.
  void wait(uint64_t bytes);

 private:
  using Clock = std::chrono::steady_clock;
  double rate_;
  Clock::time_point next_{};
};

// Target bytes of one slice. A step beside it waits at most for one slice at full rate, some 8 us on an H200.
constexpr int64_t kSliceBytes = int64_t{16} << 20;

// Calls run(slice) for consecutive slices of the copies when their turn comes; for all at once without a limit. Ends
// with false as soon as `run` returns false.
bool paced(const std::vector<Copy2d>& copies, Pace& pace, const std::function<bool(const std::vector<Copy2d>&)>& run);

}  // namespace refit::cuda
