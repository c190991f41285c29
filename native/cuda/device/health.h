// Records whether the GPUs still work and what each rank is doing. The ranks' threads write it, and threads that wait
// for them read it. It outlives the ranks, because a thread that is stuck in a GPU is never joined.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace refit::cuda {

// The operation that one rank's thread is in.
struct Activity {
  // At first no operation runs.
  explicit Activity(std::string name) : label_(std::move(name)) {}

  void begin(const char* what, bool of_gpu = true) {
    operation.store(what, std::memory_order_relaxed);
    began.store(of_gpu ? now() : 0, std::memory_order_release);
  }
  void end() { began.store(0, std::memory_order_release); }
  // Seconds in the current GPU operation; 0 if there is none.
  double seconds() const;

  std::string label() const;
  void rename(std::string name);
  // Returns the GPU's position within a step (Progress::where); the owning thread sets it once.
  void set_where(std::function<std::string()> where);
  std::string where() const;

  static int64_t now() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

  std::atomic<const char*> operation{"start"};

 private:
  std::atomic<int64_t> began{0};  // steady clock; 0: idle
  mutable std::mutex mutex_;
  std::string label_;
  std::function<std::string()> where_;
};

class Health {
 public:
  // A GPU is lost for good. Keeps the first message and wakes waiting threads.
  void lose(const std::string& message);
  bool lost() const;
  // Empty until a GPU is lost.
  std::string message() const;
  // An operation of a rank failed and its GPU still works. Other ranks may be waiting for this rank.
  void note(const std::string& message);

  std::shared_ptr<Activity> add(const std::string& label);
  // The message about the rank that has been in one GPU operation for more than `seconds`; empty if there is none.
  std::string stuck(double seconds) const;

  // Waits until `done`, until a GPU is lost, or for `seconds`. Reads `done` under the lock.
  bool wait(double seconds, const std::function<bool()>& done);
  void finish(const std::function<void()>& set);

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool lost_ = false;
  std::string message_, note_;
  std::vector<std::shared_ptr<Activity>> activities_;
};

}  // namespace refit::cuda
