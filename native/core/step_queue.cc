#include "core/step_queue.h"

#include <stdexcept>
#include <string>
#include <utility>

#include "core/quiet_thread.h"

namespace refit {

// A step with copies of all that its batch shows.
struct StepQueue::Step {
  explicit Step(const StepBatch& from) : batch(from) {
    keep(batch.seq_offsets), keep(batch.start_pos), keep(batch.page_offsets), keep(batch.pages), keep(batch.row_ints);
    keep(batch.row_floats), keep(batch.row_seeds), keep(batch.history_offsets), keep(batch.history);
    keep(batch.bias_offsets), keep(batch.bias_tokens), keep(batch.bias_values), keep(batch.id_offsets), keep(batch.ids);
    keep(batch.masks), keep(batch.adapters);
    tokens.assign(from.tokens.begin(), from.tokens.end());
    batch.tokens = tokens;
  }

  // `before`: the tokens of the step before, by row; empty if it failed.
  void feed(const std::vector<int32_t>& before) {
    for (int32_t& token : tokens) {
      if (!is_fed(token)) continue;
      if (static_cast<size_t>(fed_row(token)) >= before.size())
        throw std::runtime_error("the step takes tokens of the step before, which failed");
      token = before[static_cast<size_t>(fed_row(token))];
    }
  }

  StepBatch batch;
  std::vector<int32_t> tokens;
  StepResult result;
  std::exception_ptr error;
  bool done = false;

 private:
  template <class T>
  void keep(std::span<const T>& list) {
    const auto copy = std::make_shared<std::vector<T>>(list.begin(), list.end());
    list = *copy;
    copies_.push_back(copy);
  }

  std::vector<std::shared_ptr<const void>> copies_;
};

StepQueue::StepQueue(std::function<void(const StepBatch&, StepResult&)> run)
    : run_(std::move(run)), thread_(quiet_thread("refit-steps", [this] { loop(); })) {}

StepQueue::~StepQueue() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void StepQueue::begin(const StepBatch& batch) {
  for (size_t i = 0; i < batch.tokens.size(); ++i) {
    if (!is_fed(batch.tokens[i]) || fed_row(batch.tokens[i]) < rows_) continue;
    throw std::invalid_argument("malformed step: tokens[" + std::to_string(i) +
                                "] = " + std::to_string(batch.tokens[i]) + " is no token, nor one of " +
                                std::to_string(rows_) + " rows of the step before");
  }
  auto step = std::make_shared<Step>(batch);
  const std::lock_guard lock(mutex_);
  if (begun_.size() == kMostBegun) throw std::logic_error("more steps are begun than may be");
  rows_ = batch.rows();
  begun_.push_back(step);
  waiting_.push_back(std::move(step));
  // A single step waits for its collector, which runs it: to wake a thread and to be woken takes as long as a small
  // step.
  if (begun_.size() > 1) hand_over();
}

void StepQueue::collect(StepResult& result) {
  std::unique_lock lock(mutex_);
  if (begun_.empty()) throw std::logic_error("no step has begun");
  const std::shared_ptr<Step> step = std::move(begun_.front());
  begun_.pop_front();
  // All steps before this one have run.
  if (!waiting_.empty() && waiting_.front() == step) run_next(lock);
  changed_.wait(lock, [&] { return step->done; });
  if (step->error) std::rethrow_exception(step->error);
  result = std::move(step->result);
}

void StepQueue::settle() {
  std::unique_lock lock(mutex_);
  if (!waiting_.empty()) hand_over();
  changed_.wait(lock, [this] { return !running_ && waiting_.empty(); });
}

void StepQueue::hand_over() {
  handed_over_ = true;
  changed_.notify_all();
}

void StepQueue::run_next(std::unique_lock<std::mutex>& lock) {
  const std::shared_ptr<Step> step = std::move(waiting_.front());
  waiting_.pop_front();
  if (waiting_.empty()) handed_over_ = false;
  running_ = true;
  lock.unlock();
  try {
    step->feed(std::exchange(tokens_, {}));
    run_(step->batch, step->result);
    tokens_ = step->result.tokens;
  } catch (...) {
    step->error = std::current_exception();
  }
  lock.lock();
  running_ = false;
  step->done = true;
  changed_.notify_all();
}

void StepQueue::loop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return !running_ && (closing_ || (handed_over_ && !waiting_.empty())); });
    if (waiting_.empty()) return;
    run_next(lock);
  }
}

}  // namespace refit
