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

// Bytes that one rank needs, the same for all; bases are aligned to 256.
struct ForwardSizes {
  // The KV cache: per layer K, then V, each [pages, kv_heads, page_size, head_dim].
  size_t kv = 0;
  // Nothing in it outlives a step, so it may be released and resumed between steps.
  size_t scratch = 0;
  // Buffers and flags of collectives, that other ranks read and write, and tables that are made once: never released.
  size_t peer = 0;
};
// Throws std::invalid_argument for sizes that no GPU can hold or that the kernels cannot compute.
ForwardSizes forward_sizes(const CoreConfig& config);

// Of one rank. Where ranks exchange without NCCL, scratch and peer memory are readable and writable by all their GPUs.
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
  // Fills peer memory. `ranks` and `comms` must outlive it; memory[i] is of ranks[i]. `comms`: one of each rank
  // (join_ranks), where the GPUs do not reach each other; else empty.
  // Throws std::invalid_argument, CudaError.
  Forward(const CoreConfig& config, std::vector<std::unique_ptr<Rank>>& ranks, std::vector<ForwardMemory> memory,
          const std::vector<std::unique_ptr<NcclComm>>& comms = {});
  ~Forward();
  Forward(const Forward&) = delete;
  Forward& operator=(const Forward&) = delete;

  // One caller at a time, any thread but the ranks'. Throws std::invalid_argument on a malformed batch or one beyond
  // the configured sizes, and then nothing has been computed. What else is thrown left the KV cache of the batch's
  // sequences undefined, but the next step may be tried, unless it was DeviceLost.
  void step(const StepBatch& batch, StepResult& result);

  // Most new tokens of a step (CoreConfig::max_step_tokens, or the default).
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
  // Pinned: the step's block, and what comes back. Owned by rank 0's thread.
  std::unique_ptr<Growing> block_, results_;
  std::set<int64_t> loaded_tokens_, loaded_rows_;
  uint64_t epoch_ = 0;  // of the last collective
};

}  // namespace refit::cuda
