// A step on all ranks: embedding, layers, head and sampler, with tensor parallelism (Megatron's: columns of qkv and
// gate_up, rows of o and down, vocabulary of embed and lm_head). The recipe (core/model.h) says what a layer computes.
//
// Numerics are those of native/cpu/forward/forward.h, with one difference: with several ranks the partial sums are
// rounded to Element before they are added.
#pragma once
#include <cstdint>
#include <memory>
#include <set>
#include <vector>

#include "core/layout.h"
#include "core/model.h"
#include "core/step.h"
#include "cuda/device/rank.h"
#include "cuda/device/types.h"

namespace refit::cuda {

// Bytes of one rank, the same for all ranks; bases are aligned to 256.
struct ForwardSizes {
  // The KV cache: per layer K, then V, each [pages, kv_heads, page_size, head_dim].
  size_t kv = 0;
  // Nothing in it outlives a step, so it may be released and resumed between steps.
  size_t scratch = 0;
  // Buffers and flags of collectives, which other ranks read and write, and constant tables: never released.
  size_t peer = 0;
  // Graphs of steps, at most; the driver allocates them.
  size_t graphs = 0;
};
// Throws std::invalid_argument for sizes that no GPU can hold or that the kernels cannot compute.
ForwardSizes forward_sizes(const CoreConfig& config);

// Memory of one rank. If ranks exchange without NCCL, all their GPUs can read and write scratch and peer memory.
struct ForwardMemory {
  std::vector<std::vector<const Element*>> params;  // by set, then by parameter id of CoreConfig
  void* kv = nullptr;
  void* scratch = nullptr;
  void* peer = nullptr;
};

class Growing;
class NcclComm;
class RankForward;
struct ForwardShape;
struct PreparedStep;
enum class WideKernel : uint8_t;

class Forward {
 public:
  // Initialises peer memory. `ranks` and `comms` must outlive it; memory[i] belongs to ranks[i]. `comms`: one for each
  // rank (join_ranks) if the GPUs do not reach each other; else empty. Throws std::invalid_argument, CudaError.
  Forward(const CoreConfig& config, std::vector<std::unique_ptr<Rank>>& ranks, std::vector<ForwardMemory> memory,
          const std::vector<std::unique_ptr<NcclComm>>& comms = {});
  ~Forward();
  Forward(const Forward&) = delete;
  Forward& operator=(const Forward&) = delete;

  // A step is prepared on one thread while the step before runs on another; neither is a rank's.
  // The first thread: prepare, has_room, write. Throws std::invalid_argument for a malformed batch or one beyond the
  // configured sizes.
  std::shared_ptr<PreparedStep> prepare(const StepBatch& batch);
  // Whether the memory that carries steps is large enough; else the second thread calls make_room before `write`.
  bool has_room(const PreparedStep& step) const;
  // Writes the step to pinned memory. The batch must still be there, and of the steps before only the last may still
  // have to run.
  void write(PreparedStep& step);
  // The second thread: make_room, and for each step that was written, in order, feed and run.
  void make_room(const PreparedStep& step);
  // Puts tokens of the step before into this one, which counts as failed until it has run.
  void feed(PreparedStep& step);
  // After an exception the KV cache of the step's sequences is undefined, but the next step may be tried, except after
  // DeviceLost.
  void run(PreparedStep& step, StepResult& result);
  // All of it.
  void step(const StepBatch& batch, StepResult& result);

  // Frees the memory of graphs; the next steps make them again. Called between two steps.
  void drop_graphs();
  // Number of graphs that the ranks have. Called between two steps.
  size_t graphs() const;

  // Maximum number of new tokens of a step (CoreConfig::max_step_tokens, or the default).
  int64_t max_tokens() const;

 private:
  void check_limits(const StepBatch& batch) const;
  void load_products(int64_t tokens, int64_t rows, int set);

  const Layout layout_;
  const int pages_, page_size_;
  const bool loads_products_;
  const std::unique_ptr<ForwardShape> shape_;
  std::vector<std::unique_ptr<Rank>>& ranks_;
  std::vector<std::unique_ptr<RankForward>> forwards_;
  // Pinned: the blocks of two steps, in turns, and the results of one. Owned by rank 0's thread.
  std::unique_ptr<Growing> blocks_[2], results_;
  std::set<int64_t> loaded_tokens_, loaded_rows_;
  WideKernel wide_{};   // of attention's plans; all GPUs have it
  uint64_t epoch_ = 0;  // of the last collective of the step that was prepared last
  int rows_ = 0;        // of the step that was written last
  int side_ = 0;        // of blocks_, for that step
  // Tokens of the step that ran last, by row; empty if it failed.
  std::vector<int32_t> tokens_;
};

}  // namespace refit::cuda
