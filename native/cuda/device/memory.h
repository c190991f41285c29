// The memory of one rank on one GPU, by tag, and its sizes in bytes.
#pragma once
#include <array>
#include <cstdint>
#include <vector>

#include "core/arena.h"
#include "core/device.h"
#include "core/library/cuda_gpus.h"
#include "core/model.h"
#include "cuda/device/arena.h"
#include "cuda/forward/forward.h"

namespace refit::cuda {

// Bytes of one rank's parameters, each aligned.
struct ParamBytes {
  uint64_t weights = 0;   // of one set
  uint64_t adapters = 0;  // of the slots of adapters, which exist once
};
// Throws std::invalid_argument for a size that overflows.
ParamBytes param_bytes(const CoreConfig& config);

// Sizes of one rank; fixed_bytes includes an estimate of what CUDA itself takes. Touches no GPU. Throws
// std::invalid_argument for a bad configuration, as make_cuda_device does.
CudaMemoryPlan plan_memory(const CoreConfig& config);

// "16.1 GB"
std::string gigabytes(uint64_t bytes);

// All calls are on the rank's thread, except that `drop` and `restore` are on the thread for operations beside steps.
class RankMemory {
 public:
  // Zeroes all sets of weights. `peers`: all GPUs of the engine. Throws NoMemory, CudaError.
  RankMemory(const CoreConfig& config, const ForwardSizes& sizes, Rank& rank, const std::vector<int>& peers);

  Element* param(int id, int set) const { return params_[static_cast<size_t>(set)][id]; }
  ForwardMemory forward() const;

  bool releasable() const;
  // keep_weights copies the weights into host memory, drop_kept forgets that copy. Throws NoMemory, CudaError.
  void keep_weights(Rank& rank);
  void drop_kept() { kept_.clear(); }
  bool kept() const { return !kept_.empty(); }

  // Releases one tag (a MemoryTag). Returns the bytes given back.
  uint64_t release(MemoryTag tag, Rank& rank);
  // Contents are undefined, except for weights: they get the kept copy (which is then freed) or zeros. Throws NoMemory
  // and leaves the tag released.
  void resume(MemoryTag tag, Rank& rank);

  // The same for the weights of one set alone: `release`, `resume` and `keep_weights` leave it out until it is
  // restored.
  uint64_t drop(int set, Rank& rank);
  void restore(int set, Rank& rank);
  bool dropped(int set) const { return dropped_[set]; }

 private:
  // All that a tag releases and resumes.
  std::vector<Arena*> arenas(MemoryTag tag);

  std::vector<Arena> weights_;  // one per set
  Arena adapters_, kv_, scratch_;
  Arena peer_;                                 // for collectives: never released
  std::vector<std::vector<Element*>> params_;  // by set; adapters are the same in each
  std::array<bool, kMostSets> dropped_{};
  std::vector<refit::Arena> kept_;  // host memory: a copy of each arena of weights and adapters
};

}  // namespace refit::cuda
