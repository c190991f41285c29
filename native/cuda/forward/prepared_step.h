// A step on its way to the ranks: all that is known of it before it runs, the same for all ranks.
#pragma once
#include <cstdint>
#include <vector>

#include "core/layout.h"
#include "cuda/attention/attention.h"
#include "cuda/forward/forward_memory.h"
#include "cuda/forward/step_block.h"
#include "cuda/forward/step_room.h"
#include "cuda/sampler/sampler.h"

namespace refit::cuda {

struct PreparedStep {
  // `batch` must stay until write() returns.
  PreparedStep(const StepBatch& batch, AttentionPlan attention, const Layout& layout, const ForwardShape& shape,
               int page_size);
  PreparedStep(const PreparedStep&) = delete;
  PreparedStep& operator=(const PreparedStep&) = delete;

  // Writes the step's block to `host`, pinned memory that must stay until the step has run.
  void write(uint8_t* host);
  // Puts tokens of the step before, `tokens` by row, into the written block. Throws std::runtime_error if they are
  // missing.
  void feed(const std::vector<int32_t>& tokens);

  const AttentionPlan plan;
  const StepRoom room;
  const StepBlock block;
  const ResultBlock results;
  const SampleTraits traits;
  const int tokens, rows;
  const int set;       // of weights
  uint64_t epoch = 0;  // of collectives, before the step
  uint8_t* host_block = nullptr;
  uint8_t* host_results = nullptr;  // pinned; rank 0 fills it

 private:
  struct Fed {
    int32_t token, row;
  };
  std::vector<Fed> fed_;
};

}  // namespace refit::cuda
