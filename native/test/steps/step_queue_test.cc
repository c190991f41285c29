// Steps on a thread of their own, and the CPU device's steps under way.
#include "core/step_queue.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

#include "test/steps/steps_under_way.h"

using namespace refit;
using namespace refit::test;

namespace {

// A step of one token for each row.
StepBatch batch_of(const std::vector<int32_t>& tokens) {
  static const std::vector<uint64_t> seeds(8);
  StepBatch batch;
  batch.tokens = tokens;
  batch.row_seeds = {seeds.data(), tokens.size()};
  return batch;
}

// Gives each token plus one; throws for a token of 1000 or more.
void plus_one(const StepBatch& batch, StepResult& result) {
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
  for (const int32_t token : batch.tokens) {
    if (token >= 1000) throw std::invalid_argument("too large");
    result.tokens.push_back(token + 1);
  }
}

void steps_run_in_order_and_take_tokens_of_the_one_before() {
  StepQueue queue(plus_one);
  StepResult result;
  queue.begin(batch_of({1, 2, 3}));
  for (int step = 0; step < 50; ++step) {
    queue.begin(batch_of({~2, 100 + step, ~0}));
    CHECK_THROWS(queue.begin(batch_of({1})), std::logic_error);
    queue.collect(result);
    CHECK(result.tokens.size() == 3);
  }
  queue.collect(result);
  // Rows 0 and 2 change places in each step.
  CHECK(result.tokens == (std::vector<int32_t>{2 + 50, 150, 4 + 50}));
  CHECK_THROWS(queue.collect(result), std::logic_error);
}

void a_failed_step_fails_the_one_that_takes_its_tokens_and_no_other() {
  StepQueue queue(plus_one);
  StepResult result;
  queue.begin(batch_of({1000}));
  queue.begin(batch_of({~0}));
  CHECK_THROWS(queue.collect(result), std::invalid_argument);
  CHECK_THROWS(queue.collect(result), std::runtime_error);
  queue.begin(batch_of({1000}));
  queue.begin(batch_of({5}));
  CHECK_THROWS(queue.collect(result), std::invalid_argument);
  queue.collect(result);
  CHECK(result.tokens == std::vector<int32_t>{6});
  CHECK_THROWS(queue.begin(batch_of({~1})), std::invalid_argument);
}

// The thread may have the first step when the collector comes for the second one.
void two_steps_never_run_at_once() {
  std::atomic<int> running{0}, most{0};
  StepQueue queue([&](const StepBatch& batch, StepResult& result) {
    most = std::max(most.load(), ++running);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    running--;
    result.tokens.assign(batch.tokens.begin(), batch.tokens.end());
  });
  StepResult result;
  for (int step = 0; step < 40; ++step) {
    queue.begin(batch_of({step}));
    if (step % 2 == 1) {
      queue.begin(batch_of({~0}));
      if (step % 4 == 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      queue.collect(result);
    }
    queue.collect(result);
    CHECK(result.tokens == std::vector<int32_t>{step});
  }
  CHECK(most == 1);
}

// To wake a thread for it would take as long as a small step.
void a_single_step_runs_on_the_thread_of_its_collector() {
  std::thread::id runner;
  StepQueue queue([&](const StepBatch&, StepResult&) { runner = std::this_thread::get_id(); });
  StepResult result;
  for (int step = 0; step < 3; ++step) {
    queue.begin(batch_of({1}));
    queue.collect(result);
    CHECK(runner == std::this_thread::get_id());
    queue.begin(batch_of({1}));
    queue.settle();
    CHECK(runner != std::this_thread::get_id());
    queue.collect(result);
  }
}

void settle_and_the_destructor_wait() {
  std::atomic<int> ended{0};
  {
    StepQueue queue([&](const StepBatch&, StepResult&) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      ended++;
    });
    queue.settle();
    queue.begin(batch_of({1}));
    queue.begin(batch_of({2}));
    queue.settle();
    CHECK(ended == 2);
    StepResult result;
    queue.collect(result);
    queue.collect(result);
    queue.begin(batch_of({3}));
  }
  CHECK(ended == 3);
}

}  // namespace

int main() {
  steps_run_in_order_and_take_tokens_of_the_one_before();
  a_failed_step_fails_the_one_that_takes_its_tokens_and_no_other();
  two_steps_never_run_at_once();
  a_single_step_runs_on_the_thread_of_its_collector();
  settle_and_the_destructor_wait();
#ifndef __SANITIZE_THREAD__
  for (const Variant& v :
       {Variant{"qwen3", 64, 2, 4, 2, 16, 96, 101, false, false, true, true},
        Variant{"qwen3 moe", 64, 2, 4, 2, 32, 96, 120, false, false, true, false, 8, 2, 32, true, {1, 1}}}) {
    const TestModel model(v, DType::kFloat32, 3);
    const auto device = model.device(2, 2, "", 128, 4);
    check_steps_under_way(*device, model, 4, v.name);
  }
#endif
  return finish("step_queue_test");
}
