// Runs a device's operations on a thread of its own, so that whoever waits for one can give up when a GPU is lost or a
// rank is stuck. What is stuck then stays so, with all that it uses: the process is to end.
#pragma once
#include <functional>
#include <memory>
#include <thread>

#include "cuda/device/health.h"

namespace refit::cuda {

class Watchdog {
 public:
  // `seconds`: how long a rank may be in one operation of its GPU.
  Watchdog(std::shared_ptr<Health> health, double seconds);
  // Waits for the thread unless a GPU was lost.
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  // fn on the thread; one caller at a time. Throws what fn throws. Throws DeviceLost once a GPU is lost, maybe before
  // fn has ended: fn must own what it uses, or share in it. `patience` is a longer time for this one.
  void run(std::function<void()> fn, double patience = 0);

 private:
  struct State;
  std::shared_ptr<Health> health_;
  const double seconds_;
  std::shared_ptr<State> state_;
  std::thread thread_;
};

// `configured` where it is above 0, else $REFIT_WATCHDOG_SECONDS, else 60. Throws std::invalid_argument.
double watchdog_seconds(double configured);

}  // namespace refit::cuda
