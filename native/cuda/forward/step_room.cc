#include "cuda/forward/step_room.h"

#include <bit>

#include "cuda/adapters/adapter_segments.h"

namespace refit::cuda {
namespace {

// The next of the sizes that graphs are made for: few rows cost the same, and many are at most a sixteenth too many.
int rounded_tokens(int tokens) {
  if (tokens <= 8) return static_cast<int>(std::bit_ceil(static_cast<unsigned>(tokens)));
  const int unit = tokens <= 256 ? 8 : tokens <= 512 ? 16 : 32;
  return (tokens + unit - 1) / unit * unit;
}

// Plans have an item for each token; only long sequences add more.
int rounded_items(int items, int tokens) {
  return items <= tokens ? tokens : static_cast<int>(std::bit_ceil(static_cast<unsigned>(items)));
}

}  // namespace

StepRoom step_room(const StepBatch& batch, const AttentionPlan& plan, int64_t most_tokens) {
  const auto tokens = static_cast<int>(batch.tokens.size());
  const auto items = static_cast<int>(plan.items.size()), merges = static_cast<int>(plan.merges.size());
  const int rounded = rounded_tokens(tokens);
  const bool decode =
      batch.sequences() == tokens && plan.wide_items == 0 && !uses_adapters(batch) && rounded <= most_tokens;
  if (!decode) return {tokens, items, merges, false};
  return {rounded, rounded_items(items, rounded), merges == 0 ? 0 : rounded, true};
}

}  // namespace refit::cuda
