#include "cuda/forward/step_room.h"

#include <bit>

namespace refit::cuda {
namespace {

// Numbers of guessed tokens differ from step to step, so few sizes are more important than few tokens of padding.
int rounded_guesses(int tokens) {
  const int unit = tokens <= 16 ? 8 : tokens <= 64 ? 16 : tokens <= 256 ? 32 : 64;  // 15 sizes up to 512
  return (tokens + unit - 1) / unit * unit;
}

int power_of_2(size_t count) { return count == 0 ? 0 : static_cast<int>(std::bit_ceil(count)); }

// Plans have an item for each token; only long sequences add more.
int rounded_items(size_t items, int tokens) {
  return items <= static_cast<size_t>(tokens) ? tokens : power_of_2(items);
}

}  // namespace

// The next of the sizes that graphs are made for: few rows cost the same, and many are at most a sixteenth too many.
int rounded_tokens(int tokens) {
  if (tokens <= 8) return static_cast<int>(std::bit_ceil(static_cast<unsigned>(tokens)));
  const int unit = tokens <= 256 ? 8 : tokens <= 512 ? 16 : 32;
  return (tokens + unit - 1) / unit * unit;
}

StepRoom step_room(const StepBatch& batch, const AttentionPlan& plan, int64_t most_tokens) {
  const auto tokens = static_cast<int>(batch.tokens.size());
  const int rounded = batch.sequences() == tokens ? rounded_tokens(tokens) : rounded_guesses(tokens);
  if (!plan.is_short || plan.wide_items > 0 || rounded > most_tokens) {
    return {tokens,
            static_cast<int>(plan.items.size()),
            static_cast<int>(plan.merges.size()),
            static_cast<int>(plan.prefixes.size()),
            false,
            {}};
  }
  SegmentRoom adapters;
  if (uses_adapters(batch)) adapters = segment_room(cut_segments(token_slots(batch)).counts);
  return {rounded,
          rounded_items(plan.items.size(), rounded),
          plan.merges.empty() ? 0 : rounded,
          power_of_2(plan.prefixes.size()),
          true,
          adapters};
}

}  // namespace refit::cuda
