#include "binding/job_thread.h"

#include <stdexcept>
#include <utility>

#include "core/look.h"
#include "core/quiet_thread.h"

namespace refit::binding {
namespace {

// The next job often comes at once, so look for it before sleeping.
constexpr std::chrono::milliseconds kNext{2};

}  // namespace

JobThread::JobThread(const char* name) : thread_(quiet_thread(name, [this] { run_jobs(); })) {}

JobThread::~JobThread() { join(); }

void JobThread::post(std::function<void()> job) {
  {
    const std::lock_guard lock(mutex_);
    if (closing_) throw std::runtime_error("it is being closed");
    jobs_.push_back(std::move(job));
    waiting_ = true;
  }
  wake_.notify_one();
}

void JobThread::close() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
    waiting_ = true;
  }
  wake_.notify_one();
}

void JobThread::join() {
  close();
  // If two threads call this, both return only when the thread has ended.
  std::call_once(joined_, [this] { thread_.join(); });
}

void JobThread::run_jobs() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return closing_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    std::function<void()> job = std::move(jobs_.front());
    jobs_.pop_front();
    waiting_ = closing_ || !jobs_.empty();
    lock.unlock();
    job();
    job = nullptr;  // frees what the job holds outside the lock
    look_for(kNext, [this] { return waiting_.load(std::memory_order_relaxed); });
    lock.lock();
  }
}

}  // namespace refit::binding
