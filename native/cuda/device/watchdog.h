// Runs a device's operations on a thread of its own, so that a caller can give up when a GPU is lost or a rank is
// stuck. A stuck thread stays stuck and keeps everything that it uses: the process must end.
#pragma once
#include <functional>
#include <memory>
#include <thread>

#include "cuda/device/health.h"

namespace refit::cuda {

class Watchdog {
 public:
  // `seconds`: how long one GPU operation of a rank may take.
  Watchdog(std::shared_ptr<Health> health, double seconds);
  // Waits for the thread, unless a GPU was lost.
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  struct Task;
  // Queues fn for the thread, which runs what is queued in order. One caller at a time; throws DeviceLost.
  std::shared_ptr<Task> begin(std::function<void()> fn);
  // Waits for its end. Throws what fn throws, or DeviceLost when a GPU is lost. fn may still run then, so it must own
  // or share in what it uses. `patience`: a longer limit for this wait.
  void wait(const std::shared_ptr<Task>& task, double patience = 0);
  void run(std::function<void()> fn, double patience = 0) { wait(begin(std::move(fn)), patience); }

 private:
  struct State;
  std::shared_ptr<Health> health_;
  const double seconds_;
  std::shared_ptr<State> state_;
  std::thread thread_;
};

// `configured` if it is above 0, else $REFIT_WATCHDOG_SECONDS, else 60. Throws std::invalid_argument.
double watchdog_seconds(double configured);

}  // namespace refit::cuda
