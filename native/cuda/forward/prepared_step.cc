#include "cuda/forward/prepared_step.h"

#include <stdexcept>
#include <utility>

namespace refit::cuda {

PreparedStep::PreparedStep(const StepBatch& batch, AttentionPlan attention, const Layout& layout,
                           const ForwardShape& shape, int page_size)
    : plan(std::move(attention)),
      room(step_room(batch, plan, shape.tokens)),
      block(batch, plan, room, page_size, layout.recipe.vocab, shape.rows),
      results(batch, layout.recorded, layout.recipe.vocab),
      traits(sample_traits(batch, layout.recipe.vocab)),
      tokens(static_cast<int>(batch.tokens.size())),
      rows(batch.rows()),
      set(batch.set) {
  for (int32_t t = 0; t < tokens; ++t) {
    if (is_fed(batch.tokens[t])) fed_.push_back({t, fed_row(batch.tokens[t])});
  }
}

void PreparedStep::write(uint8_t* host) {
  host_block = host;
  block.write(host, epoch);
}

void PreparedStep::feed(const std::vector<int32_t>& tokens) {
  int32_t* const list = block.tokens(host_block);
  for (const Fed& fed : fed_) {
    if (static_cast<size_t>(fed.row) >= tokens.size())
      throw std::runtime_error("the step takes tokens of the step before, which failed");
    list[fed.token] = tokens[static_cast<size_t>(fed.row)];
  }
}

}  // namespace refit::cuda
