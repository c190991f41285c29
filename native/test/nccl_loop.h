// Replaces a GPU's stream in tests without a GPU: a thread that runs its jobs in order. The library of nccl_loop.cc
// puts its transfers on it.
#pragma once
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace refit::test {

class LoopStream {
 public:
  LoopStream() : thread_([this] { loop(); }) {}
  // Waits for all jobs.
  ~LoopStream() {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
    }
    wake_.notify_one();
    thread_.join();
  }
  LoopStream(const LoopStream&) = delete;
  LoopStream& operator=(const LoopStream&) = delete;

  void post(std::function<void()> work) {
    {
      const std::lock_guard lock(mutex_);
      work_.push_back(std::move(work));
      pending_++;
    }
    wake_.notify_one();
  }
  bool idle() {
    const std::lock_guard lock(mutex_);
    return pending_ == 0;
  }

 private:
  void loop() {
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return closing_ || !work_.empty(); });
      if (work_.empty()) return;
      {
        std::function<void()> next = std::move(work_.front());
        work_.pop_front();
        lock.unlock();
        next();
      }
      lock.lock();
      pending_--;
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> work_;
  int pending_ = 0;
  bool closing_ = false;
  std::thread thread_;
};

// The settings of the library, which tests change and read through its export.
struct LoopControl {
  int live = 0;  // communicators
  int deaf = 0;  // 1: the remaining ranks do not notice an aborted rank, as on links without a connection
  const char* join_fails = nullptr;  // the result of joining: ncclInvalidUsage, with this as NCCL's last error
};

}  // namespace refit::test
