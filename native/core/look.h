#pragma once
#include <chrono>
#include <thread>

namespace refit {

// Waits by looking, for so long at most; whether it has come. A thread that sleeps takes 0.1 to 0.2 ms to wake up on a
// virtual machine: longer than many of the tasks that it waits for.
// Only where there are processors for it: who looks keeps from working whom it waits for.
template <typename Ready>
bool look_for(std::chrono::microseconds most, Ready ready) {
  static const bool roomy = std::thread::hardware_concurrency() >= 8;
  if (!roomy) return ready();
  const auto until = std::chrono::steady_clock::now() + most;
  while (!ready()) {
    if (std::chrono::steady_clock::now() > until) return false;
    std::this_thread::yield();
  }
  return true;
}

}  // namespace refit
