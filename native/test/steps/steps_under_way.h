// Steps of a device that begin while the ones before them run, against the same steps one by one.
#pragma once
#include <algorithm>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "test/check.h"
#include "test/forward_reference.h"

namespace refit::test {

// Sequences of random prompts that decode together, in an order that changes with every step. A step takes the tokens
// of the step before as they are known, or by the row that will give them.
class SteppedChats {
 public:
  SteppedChats(const TestModel& model, int page_size, unsigned seed) : model_(model), page_size_(page_size) {
    std::mt19937 rng(seed);
    for (int32_t page = 0; chats_.size() < 7;) {
      Chat chat;
      chat.prompt.resize(3 + rng() % 30);
      for (int32_t& token : chat.prompt) token = static_cast<int32_t>(rng() % static_cast<unsigned>(model.v.vocab));
      const int most = static_cast<int>(chat.prompt.size()) + kSteps;
      for (int i = 0; i < (most + page_size - 1) / page_size; ++i) chat.pages.push_back(page++);
      chats_.push_back(chat);
    }
  }

  std::vector<StepResult> one_by_one(Device& device) {
    std::vector<StepResult> results;
    restart();
    for (int step = 0; step < kSteps; ++step) {
      results.push_back(batch(step, false).run(device));
      take(results.back());
    }
    return results;
  }

  std::vector<StepResult> overlapped(Device& device) {
    std::vector<StepResult> results(kSteps);
    restart();
    for (int step = 0; step < kSteps; ++step) {
      {
        const BatchBuilder begun = batch(step, true);
        device.begin(begun.view());
      }  // its memory is gone when the step runs
      if (step > 0) device.collect(results[static_cast<size_t>(step) - 1]);
      take({});
    }
    device.collect(results.back());
    return results;
  }

  // A step that takes the token of row 40 of the step before, which has fewer.
  BatchBuilder without_row() {
    restart();
    BatchBuilder b;
    const int token = b.sequence({~40}, static_cast<int32_t>(chats_[0].prompt.size()), chats_[0].pages);
    b.row({.token = token});
    return b;
  }

 private:
  static constexpr int kSteps = 24;
  struct Chat {
    std::vector<int32_t> prompt, pages;
    int32_t computed = 0, token = -1, row = -1;  // `token` and `row`: of the step before
  };

  void restart() {
    for (Chat& chat : chats_) chat.computed = 0, chat.token = chat.row = -1;
  }

  // Chat i enters in step i. Every chat that has entered decodes, in an order of its own.
  BatchBuilder batch(int step, bool fed) {
    BatchBuilder b;
    rows_.clear();
    std::vector<size_t> order(chats_.size());
    std::iota(order.begin(), order.end(), 0u);
    std::mt19937 rng(static_cast<unsigned>(step) + 77u);
    std::shuffle(order.begin(), order.end(), rng);
    for (const size_t i : order) {
      Chat& chat = chats_[i];
      if (static_cast<int>(i) > step) continue;
      const bool first = chat.computed == 0;
      const std::vector<int32_t> tokens = first ? chat.prompt : std::vector<int32_t>{fed ? ~chat.row : chat.token};
      const int32_t at = b.sequence(tokens, chat.computed, chat.pages);
      chat.computed += static_cast<int32_t>(tokens.size());
      b.row({.token = at + static_cast<int32_t>(tokens.size()) - 1, .top = 3, .temperature = 0.8f, .seed = 100 + i});
      rows_.push_back(i);
    }
    return b;
  }

  void take(const StepResult& result) {
    for (size_t row = 0; row < rows_.size(); ++row) {
      chats_[rows_[row]].row = static_cast<int32_t>(row);
      if (!result.tokens.empty()) chats_[rows_[row]].token = result.tokens[row];
    }
  }

  const TestModel& model_;
  const int page_size_;
  std::vector<Chat> chats_;
  std::vector<size_t> rows_;  // the chats of the last step's rows
};

inline void check_steps_under_way(Device& device, const TestModel& model, int page_size, const std::string& name) {
  SteppedChats chats(model, page_size, 5);
  const std::vector<StepResult> expected = chats.one_by_one(device);
  for (int round = 0; round < 2; ++round) {
    const std::vector<StepResult> got = chats.overlapped(device);
    for (size_t step = 0; step < expected.size(); ++step) {
      CHECKF(got[step].tokens == expected[step].tokens && got[step].logprobs == expected[step].logprobs &&
                 got[step].top_ids == expected[step].top_ids && got[step].top_logprobs == expected[step].top_logprobs &&
                 got[step].experts == expected[step].experts,
             "%s: step %zu has other bits when it begins early", name.c_str(), step);
    }
    // A row that does not exist fails that step and no other.
    CHECK_THROWS(chats.without_row().run(device), std::exception);
  }
  StepResult none;
  CHECK_THROWS(device.collect(none), std::logic_error);
}

}  // namespace refit::test
