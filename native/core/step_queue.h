// Device::begin and Device::collect for a device that computes on the caller's thread. While two steps are under way,
// they run on a thread of their own; a single one runs on that of its collector.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "core/step.h"

namespace refit {

class StepQueue {
 public:
  // `run` computes a step whose tokens are all known. The steps run one after another, in order.
  explicit StepQueue(std::function<void(const StepBatch&, StepResult&)> run);
  // Waits for the steps that have begun.
  ~StepQueue();
  StepQueue(const StepQueue&) = delete;
  StepQueue& operator=(const StepQueue&) = delete;

  // One caller at a time for these two, on any thread. See Device.
  void begin(const StepBatch& batch);
  void collect(StepResult& result);
  // Waits until all steps that have begun have run. Any thread.
  void settle();

 private:
  struct Step;
  void loop();
  // With the lock held: the thread runs the steps that wait.
  void hand_over();
  // Runs the first step that waits. The lock is open while it runs.
  void run_next(std::unique_lock<std::mutex>& lock);

  const std::function<void(const StepBatch&, StepResult&)> run_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Step>> waiting_;
  std::deque<std::shared_ptr<Step>> begun_;  // and not collected
  int rows_ = 0;                             // of the step that began last
  std::vector<int32_t> tokens_;              // of the step that ran last, by row; its runner alone uses it
  bool running_ = false, handed_over_ = false, closing_ = false;
  std::thread thread_;
};

}  // namespace refit
