#include "cuda/forward/forward.h"

#include <algorithm>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/step_check.h"
#include "cuda/forward/forward_memory.h"
#include "cuda/forward/forward_rank.h"
#include "cuda/forward/prepared_step.h"
#include "cuda/forward/rope_table.h"

namespace refit::cuda {
namespace {

// Limit for all rows of a step together: 2 GB of results.
constexpr int64_t kMostTops = int64_t{1} << 28;

}  // namespace

Forward::Forward(const CoreConfig& config, std::vector<std::unique_ptr<Rank>>& ranks, std::vector<ForwardMemory> memory,
                 const std::vector<std::unique_ptr<NcclComm>>& comms)
    : layout_(config),
      pages_(config.pages),
      page_size_(config.page_size),
      loads_products_(config.ranks > 1 || config.deterministic),
      shape_(std::make_unique<ForwardShape>(config, layout_)),
      ranks_(ranks),
      forwards_(ranks.size()),
      blocks_{std::make_unique<Growing>(Growing::Where::kHost), std::make_unique<Growing>(Growing::Where::kHost)},
      results_(std::make_unique<Growing>(Growing::Where::kHost)) {
  if (ranks.size() != static_cast<size_t>(layout_.ranks) || memory.size() != ranks.size())
    throw std::invalid_argument("bad configuration: " + std::to_string(layout_.ranks) + " ranks, but " +
                                std::to_string(ranks.size()) + " threads and memory for " +
                                std::to_string(memory.size()));
  if (!comms.empty() && comms.size() != ranks.size())
    throw std::invalid_argument("bad configuration: " + std::to_string(comms.size()) + " communicators for " +
                                std::to_string(ranks.size()) + " ranks");
  std::vector<RankBuffers> buffers;
  ForwardSizes sizes;
  for (const ForwardMemory& m : memory) buffers.push_back(carve_buffers(layout_, *shape_, m.scratch, m.peer, sizes));
  const std::vector<float> rope = rope_table(layout_.recipe, 0, shape_->context);
  std::set<int> gpus;
  for (const auto& rank : ranks_) gpus.insert(rank->device);
  const bool shared_gpus = gpus.size() < ranks_.size();
  std::vector<WideKernel> wide(ranks_.size());
  on_all(ranks_, [&](Rank& rank) {
    const RankBuffers& own = buffers[rank.index];
    wide[rank.index] = wide_kernel_here(layout_.recipe.head_dim, config.deterministic);
    std::unique_ptr<Exchange> exchange;
    if (!comms.empty()) {
      exchange = nccl_exchange(rank, layout_, *shape_, own, *comms[rank.index]);
    } else if (ranks_.size() > 1) {
      exchange = peer_exchange(rank, buffers, shared_gpus);
    }
    forwards_[rank.index] = std::make_unique<RankForward>(config, layout_, *shape_, rank, memory[rank.index], own, rope,
                                                          std::move(exchange));
    if (rank.index != 0) return;
    for (auto& block : blocks_) block->reserve(RankForward::kFirstBlock, "memory for the step's block");
    results_->reserve(RankForward::kFirstResults, "memory for the step's results");
  });
  wide_ = *std::min_element(wide.begin(), wide.end());
}

// CUDA resources are freed on the threads that allocated them.
Forward::~Forward() {
  try {
    on_all(ranks_, [this](Rank& rank) {
      rank.doing("free the forward pass");
      forwards_[rank.index].reset();
      if (rank.index == 0) blocks_[0].reset(), blocks_[1].reset(), results_.reset();
    });
  } catch (...) {
  }
}

void Forward::drop_graphs() {
  on_all(ranks_, [this](Rank& rank) { forwards_[rank.index]->drop_graphs(); });
}

size_t Forward::graphs() const {
  size_t sum = 0;
  for (const auto& rank : forwards_) sum += rank->graphs();
  return sum;
}

int64_t Forward::max_tokens() const { return shape_->tokens; }

void Forward::check_limits(const StepBatch& batch) const {
  const auto fail = [](const std::string& what) { throw std::invalid_argument("malformed step: " + what); };
  const auto tokens = static_cast<int64_t>(batch.tokens.size());
  if (tokens > shape_->tokens) {
    fail(std::to_string(tokens) + " tokens, but this engine was made for at most " + std::to_string(shape_->tokens) +
         " in a step (maxStepTokens)");
  }
  for (int s = 0; s < batch.sequences(); ++s) {
    const int64_t end = int64_t{batch.start_pos[s]} + batch.seq_offsets[s + 1] - batch.seq_offsets[s];
    if (end > shape_->context) {
      fail("sequence " + std::to_string(s) + " ends at position " + std::to_string(end) +
           ", but this engine was made for sequences of at most " + std::to_string(shape_->context) +
           " tokens (maxContext)");
    }
  }
  int64_t tops = 0;
  for (int r = 0; r < batch.rows(); ++r) tops += batch.row_ints[static_cast<size_t>(r) * kRowInts + 3];
  if (tops > kMostTops)
    fail(std::to_string(tops) + " top logprobs in one step; at most " + std::to_string(kMostTops) + " are computed");
}

bool Forward::has_room(const PreparedStep& step) const {
  return blocks_[0]->bytes() >= step.block.gpu_bytes() && results_->bytes() >= step.results.bytes();
}

// Separate from the launches: an allocation may wait for a GPU, and then no GPU may wait for a peer.
void Forward::make_room(const PreparedStep& step) {
  const size_t block = step.block.gpu_bytes(), results = step.results.bytes();
  on_all(ranks_, [&](Rank& rank) { forwards_[rank.index]->reserve(block, results); });
  // Last: the GPUs' blocks must hold everything that these hold.
  auto grown = ranks_.front()->run([&] {
    for (const int side : {1, 0}) blocks_[side]->reserve(block, "memory for the step's block");
    results_->reserve(results, "memory for the step's results");
  });
  wait(grown);
}

// For the same reason: kernels for a product of a new size are loaded while no GPU computes. Deterministic ones are
// also chosen here, by samples in the step's buffers.
void Forward::load_products(int64_t tokens, int64_t rows, int set) {
  if (!loads_products_) return;
  if (!loaded_tokens_.contains(tokens)) {
    on_all(ranks_, [&](Rank& rank) { forwards_[rank.index]->load_for_tokens(static_cast<int>(tokens), set); });
    loaded_tokens_.insert(tokens);
  }
  // The head's blocks: full ones, and the rest.
  for (const int64_t exact : {rows < shape_->rows ? 0 : shape_->rows, rows % shape_->rows}) {
    const int64_t count = shape_->head_rows(exact);
    if (count == 0 || loaded_rows_.contains(count)) continue;
    on_all(ranks_, [&](Rank& rank) { forwards_[rank.index]->load_for_rows(static_cast<int>(count), set); });
    loaded_rows_.insert(count);
  }
}

std::shared_ptr<PreparedStep> Forward::prepare(const StepBatch& batch) {
  check_batch(batch, {layout_.recipe.vocab, pages_, page_size_, layout_.adapters.slots, rows_});
  check_limits(batch);
  const auto step = std::make_shared<PreparedStep>(
      batch, plan_attention(batch, layout_.group, layout_.kv_heads, AttentionSplit::kAuto, wide_, {page_size_}),
      layout_, *shape_, page_size_);
  if (step->plan.part_rows > shape_->part_rows)
    throw std::logic_error("attention needs " + std::to_string(step->plan.part_rows) +
                           " rows of partial results, but " + std::to_string(shape_->part_rows) + " are there");
  step->epoch = epoch_;
  // Also if a rank fails: flags of this step must not be taken for those of the next.
  epoch_ += RankForward::collectives(layout_, *shape_, step->room.tokens, step->rows);
  return step;
}

void Forward::write(PreparedStep& step) {
  rows_ = step.rows;
  side_ ^= 1;
  step.write(blocks_[side_]->data());
  step.host_results = results_->data();
}

void Forward::feed(PreparedStep& step) { step.feed(std::exchange(tokens_, {})); }

void Forward::run(PreparedStep& step, StepResult& result) {
  result = {};
  if (step.tokens == 0) return;  // rows and experts belong to tokens, so there are none
  load_products(step.room.tokens, step.rows, step.set);
  // Graphs of several ranks are made while no rank computes, for the same reason as room and kernels.
  if (forwards_.front()->wants_graph(step))
    on_all(ranks_, [&](Rank& rank) { forwards_[rank.index]->make_graph(step); });
  on_all(ranks_, [&](Rank& rank) { forwards_[rank.index]->run(step); });
  step.results.read(results_->data(), result);
  tokens_ = result.tokens;
}

void Forward::step(const StepBatch& batch, StepResult& result) {
  const std::shared_ptr<PreparedStep> step = prepare(batch);
  if (!has_room(*step)) make_room(*step);
  write(*step);
  feed(*step);
  run(*step, result);
}

}  // namespace refit::cuda
