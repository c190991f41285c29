// What an engine holds on one GPU for one rank, by tag, and how many bytes that is.
#pragma once
#include <cstdint>
#include <vector>

#include "core/arena.h"
#include "core/device.h"
#include "core/library/cuda_gpus.h"
#include "core/model.h"
#include "cuda/device/arena.h"
#include "cuda/forward/forward.h"

namespace refit::cuda {

// Bytes of the parameters of one rank, each aligned. Throws std::invalid_argument for a size that overflows.
uint64_t weight_bytes(const CoreConfig& config);

// Of one rank; the estimate of what CUDA itself takes is in fixed_bytes. Throws std::invalid_argument as
// make_cuda_device does for a bad configuration, and touches no GPU.
CudaMemoryPlan plan_memory(const CoreConfig& config);

// "16.1 GB"
std::string gigabytes(uint64_t bytes);

// Called on the rank's thread, all of it.
class RankMemory {
 public:
  // Weights are zeroed. `peers`: all GPUs of the engine. Throws NoMemory, CudaError.
  RankMemory(const CoreConfig& config, const ForwardSizes& sizes, Rank& rank, const std::vector<int>& peers);

  bf16* param(int id) const { return params_[id]; }
  ForwardMemory forward() const;

  bool releasable() const { return weights_.releasable() && kv_.releasable() && scratch_.releasable(); }
  // Copies the weights into host memory, and forgets that copy. Throws NoMemory, CudaError.
  void keep_weights(Rank& rank);
  void drop_kept() { kept_ = refit::Arena(); }
  bool kept() const { return kept_.bytes() > 0; }

  // One tag (a MemoryTag). Returns the bytes given back.
  uint64_t release(MemoryTag tag, Rank& rank);
  // Contents are undefined but for weights: the kept copy, which goes, or zeros. Throws NoMemory and leaves it
  // released.
  void resume(MemoryTag tag, Rank& rank);

 private:
  Arena& arena(MemoryTag tag);

  Arena weights_, kv_, scratch_;
  Arena peer_;  // of collectives: never released
  std::vector<bf16*> params_;
  refit::Arena kept_;  // host memory
};

}  // namespace refit::cuda
