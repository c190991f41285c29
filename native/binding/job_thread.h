// A thread that runs jobs in the order of arrival.
#pragma once
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace refit::binding {

class JobThread {
 public:
  // `name`: at most 15 characters; the system's tools show it.
  explicit JobThread(const char* name);
  // Closes and joins: never on the thread itself.
  ~JobThread();
  JobThread(const JobThread&) = delete;
  JobThread& operator=(const JobThread&) = delete;

  // Jobs must not throw. Throws std::runtime_error after close().
  void post(std::function<void()> job);
  // Takes no more jobs and returns at once. Posted jobs still run.
  void close();
  // Closes, and returns when all posted jobs have run.
  void join();

 private:
  void run_jobs();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> jobs_;
  bool closing_ = false;
  std::atomic<bool> waiting_ = false;  // a job is queued, or no more will come; read without the lock
  std::once_flag joined_;
  std::thread thread_;
};

}  // namespace refit::binding
