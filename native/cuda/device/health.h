// Whether the GPUs still work, and what each rank is doing: written by the ranks' threads, read by whoever waits for
// them. It outlives the ranks, because a thread that is stuck in a GPU is never joined.
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

// What one rank's thread is doing.
struct Activity {
  // Nothing is under way at first.
  explicit Activity(std::string name) : label_(std::move(name)) {}

  void begin(const char* what, bool of_gpu = true) {
    operation.store(what, std::memory_order_relaxed);
    began.store(of_gpu ? now() : 0, std::memory_order_release);
  }
  void end() { began.store(0, std::memory_order_release); }
  // Seconds in this operation of the GPU; 0 where it is in none.
  double seconds() const;

  std::string label() const;
  void rename(std::string name);
  // Where within a step its GPU is (Progress::where); the thread that owns it sets it once.
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
  // A GPU is lost for good; the first message stays. Wakes who waits.
  void lose(const std::string& message);
  bool lost() const;
  // Empty until something was lost.
  std::string message() const;
  // A rank's operation failed without its GPU being lost: what other ranks may be waiting for.
  void note(const std::string& message);

  std::shared_ptr<Activity> add(const std::string& label);
  // The message for the rank that has been in one operation of its GPU for more than `seconds`; empty where none has.
  std::string stuck(double seconds) const;

  // Waits until `done` or lost, or for `seconds`. `done` is read under the lock; `finish` runs `set` under it and
  // wakes.
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
