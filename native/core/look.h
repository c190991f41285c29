#pragma once
#include <chrono>
#include <thread>

namespace refit {

// There are processors for threads that look instead of sleeping: who looks keeps from working whom it waits for.
inline bool is_roomy() {
  static const bool roomy = std::thread::hardware_concurrency() >= 8;
  return roomy;
}

// Waits by looking, for so long at most; whether it has come. A thread that sleeps takes 0.1 to 0.2 ms to wake up on a
// virtual machine: longer than many of the tasks that it waits for.
// Where there is no room for that it looks once.
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

}  // namespace refit
