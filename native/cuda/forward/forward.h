// A step on all ranks: embedding, layers, head and sampler, with tensor parallelism (Megatron's: columns of qkv and
// gate_up, rows of o and down, vocabulary of embed and lm_head). The recipe (core/model.h) says what a layer computes.
//
// Numerics are those of native/cpu/forward/forward.h, with one difference: with several ranks the partial sums are
// rounded to bf16 before they are added.
#pragma once
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
};
// Throws std::invalid_argument for sizes that no GPU can hold or that the kernels cannot compute.
ForwardSizes forward_sizes(const CoreConfig& config);

// Memory of one rank. If ranks exchange without NCCL, all their GPUs can read and write scratch and peer memory.
struct ForwardMemory {
  std::vector<const bf16*> params;  // by parameter id of CoreConfig
  void* kv = nullptr;
  void* scratch = nullptr;
  void* peer = nullptr;
};

class Growing;
class NcclComm;
class RankForward;
class ResultBlock;
class StepBlock;
struct ForwardShape;

class Forward {
 public:
  // Initialises peer memory. `ranks` and `comms` must outlive it; memory[i] belongs to ranks[i]. `comms`: one for each
  // rank (join_ranks) if the GPUs do not reach each other; else empty. Throws std::invalid_argument, CudaError.
  Forward(const CoreConfig& config, std::vector<std::unique_ptr<Rank>>& ranks, std::vector<ForwardMemory> memory,
          const std::vector<std::unique_ptr<NcclComm>>& comms = {});
  ~Forward();
  Forward(const Forward&) = delete;
  Forward& operator=(const Forward&) = delete;

  // One caller at a time, on any thread except the ranks'. Throws std::invalid_argument for a malformed batch or one
  // beyond the configured sizes; then nothing was computed. After any other exception the KV cache of the batch's
  // sequences is undefined, but the next step may be tried, except after DeviceLost.
  void step(const StepBatch& batch, StepResult& result);

  // Frees the memory of graphs; the next steps make them again. Called between two steps.
  void drop_graphs();
  // Number of graphs that the ranks have. Called between two steps.
  size_t graphs() const;

  // Maximum number of new tokens of a step (CoreConfig::max_step_tokens, or the default).
  int64_t max_tokens() const;

 private:
  void check_limits(const StepBatch& batch) const;
  void make_room(const StepBlock& block, const ResultBlock& results);
  void load_products(int64_t tokens, int64_t rows);

  const Layout layout_;
  const int pages_, page_size_;
  const std::unique_ptr<ForwardShape> shape_;
  std::vector<std::unique_ptr<Rank>>& ranks_;
  std::vector<std::unique_ptr<RankForward>> forwards_;
  // Pinned: the step's block and its results. Owned by rank 0's thread.
  std::unique_ptr<Growing> block_, results_;
  std::set<int64_t> loaded_tokens_, loaded_rows_;
  uint64_t epoch_ = 0;  // of the last collective
  int wide_rows_ = 0;   // of attention's plans; all GPUs can compute them
};

}  // namespace refit::cuda
