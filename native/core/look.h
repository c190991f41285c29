#pragma once
#include <algorithm>
#include <chrono>
#include <thread>

namespace refit {

// True if there are enough processors for threads that spin instead of sleeping. Otherwise a spinning thread could take
// the processor from the thread that it waits for.
inline bool is_roomy() {
  static const bool roomy = std::thread::hardware_concurrency() >= 8;
  return roomy;
}

// Spins until the condition holds, for a limited time; returns whether it holds. A sleeping thread needs 0.1 to 0.2 ms
// to wake up on a virtual machine, which is longer than many of the tasks that it waits for. Without enough
// processors the condition is tested once.
template <typename Ready>
bool look_for(std::chrono::microseconds most, Ready ready) {
  if (!is_roomy()) return ready();
  const auto until = std::chrono::steady_clock::now() + most;
  while (!ready()) {
    if (std::chrono::steady_clock::now() > until) return false;
    std::this_thread::yield();
  }
  return true;
}

// Sleeps between two tests of a condition: 20 us at first, twice as long each time, at most 500 us.
class Backoff {
 public:
  void sleep() {
    std::this_thread::sleep_for(next_);
    next_ = std::min(next_ * 2, kLongest);
  }

 private:
  static constexpr std::chrono::microseconds kLongest{500};
  std::chrono::microseconds next_{20};
};

}  // namespace refit
