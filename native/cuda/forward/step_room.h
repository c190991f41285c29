// The sizes of a step on GPUs. Those of decode steps and of other short ones (attention.h) are rounded up, so that a
// step has one of a few sizes: the step's block then has the same layout and its kernels the same grids whenever the
// sizes are the same, as a graph needs (step_graphs.h). The added tokens are padding: they have no KV slot, no
// attention, no experts and no rows, and nothing reads their results. Every such step is rounded, also one that is
// launched without a graph, so bits do not depend on graphs. Which adapters a step uses is in its block, and only how
// many segments they have is rounded.
#pragma once
#include <compare>

#include "core/step.h"
#include "cuda/adapters/adapter_segments.h"
#include "cuda/attention/attention.h"

namespace refit::cuda {

struct StepRoom {
  int tokens, items, merges, prefixes;  // items, merges and prefixes of the attention plan
  bool is_rounded;
  SegmentRoom adapters;  // of a step that is rounded

  auto operator<=>(const StepRoom&) const = default;
};

// The KV slot of a token that is padding.
constexpr int32_t kNoSlot = -1;

// Rounds up a number of tokens or rows of a decode step.
int rounded_tokens(int tokens);

// most_tokens: the step's buffers have no more.
StepRoom step_room(const StepBatch& batch, const AttentionPlan& plan, int64_t most_tokens);

}  // namespace refit::cuda
