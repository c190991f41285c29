// The memory of one rank on one GPU, by tag, and its sizes in bytes.
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

// Bytes of one rank's parameters, each aligned. Throws std::invalid_argument for a size that overflows.
uint64_t weight_bytes(const CoreConfig& config);

// Sizes of one rank; fixed_bytes includes an estimate of what CUDA itself takes. Touches no GPU. Throws
// std::invalid_argument for a bad configuration, as make_cuda_device does.
CudaMemoryPlan plan_memory(const CoreConfig& config);

// "16.1 GB"
std::string gigabytes(uint64_t bytes);

// All calls are on the rank's thread.
class RankMemory {
 public:
  // Zeroes the weights. `peers`: all GPUs of the engine. Throws NoMemory, CudaError.
  RankMemory(const CoreConfig& config, const ForwardSizes& sizes, Rank& rank, const std::vector<int>& peers);

  bf16* param(int id) const { return params_[id]; }
  ForwardMemory forward() const;

  bool releasable() const { return weights_.releasable() && kv_.releasable() && scratch_.releasable(); }
  // keep_weights copies the weights into host memory, drop_kept forgets that copy. Throws NoMemory, CudaError.
  void keep_weights(Rank& rank);
  void drop_kept() { kept_ = refit::Arena(); }
  bool kept() const { return kept_.bytes() > 0; }

  // Releases one tag (a MemoryTag). Returns the bytes given back.
  uint64_t release(MemoryTag tag, Rank& rank);
  // Contents are undefined, except for weights: they get the kept copy (which is then freed) or zeros. Throws NoMemory
  // and leaves the tag released.
  void resume(MemoryTag tag, Rank& rank);

 private:
  Arena& arena(MemoryTag tag);

  Arena weights_, kv_, scratch_;
  Arena peer_;  // for collectives: never released
  std::vector<bf16*> params_;
  refit::Arena kept_;  // host memory
};

}  // namespace refit::cuda
