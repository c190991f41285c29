// Plans of attention and sizes of steps, which need no GPU. Argument: [seed].
#include <cstdlib>
#include <set>

#include "cuda/forward/step_room.h"
#include "test/gpu/attention/attention_plan_check.h"

using namespace refit;
using namespace refit::test;

namespace {

cuda::StepRoom room_of(const PlanCase& c, int group, int64_t most_tokens = 8192) {
  const StepBatch batch = c.batch();
  return cuda::step_room(batch,
                         cuda::plan_attention(batch, group, 8, cuda::AttentionSplit::kAuto, cuda::WideKernel::kHopper),
                         most_tokens);
}

PlanCase sequences(int count, int tokens, bool samples = true) {
  PlanCase c;
  for (int i = 0; i < count; ++i) c.add(100, tokens, samples);
  return c;
}

// A decode step has one of few sizes, at most a sixteenth too large beyond 128 tokens.
void test_decode() {
  std::set<int> sizes;
  for (int count = 1; count <= 512; ++count) {
    const cuda::StepRoom room = room_of(sequences(count, 1), 4);
    CHECK(room.is_rounded && room.tokens >= count && room.items == room.tokens);
    CHECKF(room.tokens <= std::max(8, count + 7) || room.tokens * 16 <= count * 17, "%d for %d", room.tokens, count);
    sizes.insert(room.tokens);
  }
  CHECKF(sizes.size() <= 52, "%zu sizes", sizes.size());
  CHECK(room_of(sequences(2000, 1), 4).is_rounded);
  const cuda::StepRoom full = room_of(sequences(100, 1), 4, 100);
  CHECK(!full.is_rounded && full.tokens == 100);
}

// A step with guesses has one of fewer sizes. One with many tokens, or many of one sequence, or a prompt, is as it is.
void test_guesses() {
  std::set<int> sizes;
  for (int tokens = 2; tokens <= cuda::kShortStepTokens; ++tokens) {
    PlanCase c;
    c.add(300, 2, true);
    for (int left = tokens - 2; left > 0; left -= 5) c.add(40, std::min(left, 5), true);
    const cuda::StepRoom room = room_of(c, 4);
    CHECK(room.is_rounded && room.tokens >= tokens && room.items == room.tokens);
    sizes.insert(room.tokens);
  }
  CHECKF(sizes.size() <= 15, "%zu sizes", sizes.size());
  CHECK(room_of(sequences(16, 32), 4).is_rounded);
  PlanCase mixed = sequences(8, 5);
  mixed.add(0, 20);
  for (const PlanCase& c : {sequences(17, 32), sequences(1, 33), sequences(300, 2), sequences(2, 3, false), mixed}) {
    const cuda::StepRoom room = room_of(c, 4);
    CHECK(!room.is_rounded && room.tokens == static_cast<int>(c.tokens.size()));
  }
  CHECK(!room_of(sequences(2, 3), 32).is_rounded);  // the rows of one token are too many for a narrow item
}

// Guesses have narrow items also beside a prompt, whose items are wide.
void test_mixed() {
  PlanCase c = sequences(3, 9);
  c.add(0, 40);
  const cuda::AttentionPlan plan =
      cuda::plan_attention(c.batch(), 4, 8, cuda::AttentionSplit::kNever, cuda::WideKernel::kHopper);
  CHECK(plan.wide_items == 2 && plan.items.size() == 2 + 3 * 3);
  for (const cuda::AttentionItem& item : plan.items) CHECK(item.tokens * 4 <= cuda::kNarrowRows || item.sequence == 3);
}

}  // namespace

int main(int argc, char** argv) {
  check_plans(argc > 1 ? static_cast<uint64_t>(std::atoi(argv[1])) : 1);
  test_decode();
  test_guesses();
  test_mixed();
  return finish("plan_test");
}
