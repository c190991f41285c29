#include "cuda/device/watchdog.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <deque>
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
constexpr std::chrono::milliseconds kNextOperation{2}, kOperationDone{30};

}  // namespace

struct Watchdog::Task {
  std::function<void()> fn;
  std::exception_ptr error;
  std::atomic<bool> done = false;  // set under the lock of Health
};

// Shared with the thread, which may outlive the watchdog.
struct Watchdog::State {
  std::mutex mutex;
  std::condition_variable wake;
  std::deque<std::shared_ptr<Task>> tasks;
  bool closing = false;
  std::atomic<bool> waiting = false;  // a task is queued, or no more will come; read without the lock
};

Watchdog::Watchdog(std::shared_ptr<Health> health, double seconds)
    : health_(std::move(health)), seconds_(seconds), state_(std::make_shared<State>()) {
  thread_ = quiet_thread("refit-cuda", [state = state_, health = health_] {
    std::unique_lock lock(state->mutex);
    for (;;) {
      state->wake.wait(lock, [&] { return state->closing || !state->tasks.empty(); });
      if (state->tasks.empty()) return;
      std::shared_ptr<Task> task = std::move(state->tasks.front());
      state->tasks.pop_front();
      state->waiting = state->closing || !state->tasks.empty();
      lock.unlock();
      health->note("");
      std::exception_ptr error;
      try {
        task->fn();
      } catch (...) {
        error = std::current_exception();
      }
      health->finish([&] {
        task->fn = nullptr;  // what it holds is freed here
        task->error = error;
        task->done = true;
      });
      task.reset();
      look_for(kNextOperation, [&] { return state->waiting.load(std::memory_order_relaxed); });
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

std::shared_ptr<Watchdog::Task> Watchdog::begin(std::function<void()> fn) {
  if (health_->lost()) throw DeviceLost(health_->message());
  auto task = std::make_shared<Task>();
  task->fn = std::move(fn);
  {
    const std::lock_guard lock(state_->mutex);
    state_->tasks.push_back(task);
    state_->waiting = true;
  }
  state_->wake.notify_one();
  return task;
}

void Watchdog::wait(const std::shared_ptr<Task>& task, double patience) {
  const double seconds = std::max(seconds_, patience);
  look_for(kOperationDone, [&] { return task->done.load(std::memory_order_acquire); });
  const double look = std::clamp(seconds / 8, 0.01, 1.0);
  while (!health_->wait(look, [&] { return task->done.load(std::memory_order_relaxed); })) {
    const std::string stuck = health_->stuck(seconds);
    if (!stuck.empty()) health_->lose(stuck);
  }
  if (health_->lost()) throw DeviceLost(health_->message());
  if (!task->error) return;
  try {
    std::rethrow_exception(task->error);
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
