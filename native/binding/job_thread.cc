#include "binding/job_thread.h"

#include <pthread.h>
#include <signal.h>

#include <stdexcept>
#include <utility>

namespace refit::binding {

JobThread::JobThread(const char* name) {
  // Signals belong to the host program's threads.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::thread([this] { run_jobs(); });
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(thread_.native_handle(), name);
}

JobThread::~JobThread() { join(); }

void JobThread::post(std::function<void()> job) {
  {
    const std::lock_guard lock(mutex_);
    if (closing_) throw std::runtime_error("it is being closed");
    jobs_.push_back(std::move(job));
  }
  wake_.notify_one();
}

void JobThread::close() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  wake_.notify_one();
}

void JobThread::join() {
  close();
  // Of two callers both return only when the thread has ended.
  std::call_once(joined_, [this] { thread_.join(); });
}

void JobThread::run_jobs() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return closing_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    std::function<void()> job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    job();
    job = nullptr;  // what it holds is freed here, not under the lock
    lock.lock();
  }
}

}  // namespace refit::binding
