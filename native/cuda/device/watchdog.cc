#include "cuda/device/watchdog.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "core/device.h"
#include "core/look.h"
#include "cuda/device/check.h"
#include "cuda/device/rank.h"
#include "cuda/device/sticky.h"

namespace refit::cuda {
namespace {

// The next operation often comes at once, so look for it before sleeping. A caller waits through the copies of a whole
// model, so look longer there.
constexpr std::chrono::milliseconds kNext{2}, kDone{30};

}  // namespace

// Shared with the thread, which may outlive the watchdog.
struct Watchdog::State {
  struct Job {
    std::function<void()> fn;
    std::exception_ptr error;
    std::atomic<bool> done = false;  // set under the lock of Health
  };

  std::mutex mutex;
  std::condition_variable wake;
  std::shared_ptr<Job> job;
  bool closing = false;
  std::atomic<bool> waiting = false;  // a job is queued, or no more will come; read without the lock
};

Watchdog::Watchdog(std::shared_ptr<Health> health, double seconds)
    : health_(std::move(health)), seconds_(seconds), state_(std::make_shared<State>()) {
  thread_ = quiet_thread("refit-cuda", [state = state_, health = health_] {
    std::unique_lock lock(state->mutex);
    for (;;) {
      state->wake.wait(lock, [&] { return state->closing || state->job; });
      if (!state->job) return;
      std::shared_ptr<State::Job> job = std::move(state->job);
      state->job.reset();
      state->waiting = state->closing;
      lock.unlock();
      std::exception_ptr error;
      try {
        job->fn();
      } catch (...) {
        error = std::current_exception();
      }
      health->finish([&] {
        job->error = error;
        job->done = true;
      });
      job.reset();
      look_for(kNext, [&] { return state->waiting.load(std::memory_order_relaxed); });
      lock.lock();
    }
  });
}

Watchdog::~Watchdog() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->closing = true;
    state_->waiting = true;
  }
  state_->wake.notify_one();
  if (health_->lost()) {
    thread_.detach();
  } else {
    thread_.join();
  }
}

void Watchdog::run(std::function<void()> fn, double patience) {
  if (health_->lost()) throw DeviceLost(health_->message());
  health_->note("");
  const double seconds = std::max(seconds_, patience);
  auto job = std::make_shared<State::Job>();
  job->fn = std::move(fn);
  {
    const std::lock_guard lock(state_->mutex);
    state_->job = job;
    state_->waiting = true;
  }
  state_->wake.notify_one();
  look_for(kDone, [&] { return job->done.load(std::memory_order_acquire); });
  const double look = std::clamp(seconds / 8, 0.01, 1.0);
  while (!health_->wait(look, [&] { return job->done.load(std::memory_order_relaxed); })) {
    const std::string stuck = health_->stuck(seconds);
    if (!stuck.empty()) health_->lose(stuck);
  }
  if (health_->lost()) throw DeviceLost(health_->message());
  if (!job->error) return;
  try {
    std::rethrow_exception(job->error);
  } catch (const CudaError& e) {
    if (!is_sticky(e.code)) throw;
    // The error occurred outside of a rank's thread.
    health_->lose(std::string("a GPU is lost: ") + e.what());
    throw DeviceLost(health_->message());
  }
}

double watchdog_seconds(double configured) {
  if (configured > 0) return configured;
  const char* const set = std::getenv("REFIT_WATCHDOG_SECONDS");
  if (set == nullptr || *set == 0) return 60;
  char* end = nullptr;
  const double seconds = std::strtod(set, &end);
  if (*end != 0 || !std::isfinite(seconds) || seconds <= 0) {
    throw std::invalid_argument(std::string("REFIT_WATCHDOG_SECONDS: expected a number of seconds above 0, got \"") +
                                set + '"');
  }
  return seconds;
}

}  // namespace refit::cuda
