#include "cuda/weights/pace.h"

#include <algorithm>
#include <thread>

namespace refit::cuda {
namespace {

int64_t bytes_of(const Copy2d& copy) { return copy.rows * copy.cols * static_cast<int64_t>(sizeof(Element)); }

// Rows [first, first + rows) of a copy.
Copy2d part(const Copy2d& copy, int64_t first, int64_t rows) {
  Copy2d out = copy;
  out.src = static_cast<const uint8_t*>(copy.src) + first * copy.src_row_bytes;
  out.dst = copy.dst + first * copy.dst_cols;
  out.rows = rows;
  return out;
}

}  // namespace

void Pace::wait(uint64_t bytes) {
  if (!limited()) return;
  const auto now = Clock::now();
  if (next_ > now) std::this_thread::sleep_until(next_);
  const std::chrono::duration<double> takes(static_cast<double>(bytes) / rate_);
  // Time that was lost by sleeping too long is made up for; time without work is not.
  next_ = std::max(next_, now) + std::chrono::duration_cast<Clock::duration>(takes);
}

bool paced(const std::vector<Copy2d>& copies, Pace& pace, const std::function<bool(const std::vector<Copy2d>&)>& run) {
  if (!pace.limited()) return run(copies);
  std::vector<Copy2d> slice;
  int64_t bytes = 0;
  const auto flush = [&] {
    if (slice.empty()) return true;
    pace.wait(static_cast<uint64_t>(bytes));
    const bool going = run(slice);
    slice.clear();
    bytes = 0;
    return going;
  };
  for (const Copy2d& copy : copies) {
    const int64_t row_bytes = std::max<int64_t>(1, bytes_of(copy) / std::max<int64_t>(1, copy.rows));
    for (int64_t row = 0; row < copy.rows;) {
      if (bytes + row_bytes > kSliceBytes && !flush()) return false;
      const int64_t room = std::max<int64_t>(1, (kSliceBytes - bytes) / row_bytes);
      const int64_t rows = std::min(copy.rows - row, room);
      slice.push_back(part(copy, row, rows));
      bytes += rows * row_bytes;
      row += rows;
    }
  }
  return flush();
}

}  // namespace refit::cuda
