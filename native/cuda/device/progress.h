// Tracks the position of a GPU within a step. The host notes the name of every launch, and the GPU writes a word of
// host memory at each boundary of layers, so after a failure the possible operations are known by name.
//
// A stream memory operation (cuStreamWriteValue32) writes the word: no kernel, about a microsecond of host time for
// each layer.
#pragma once
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "cuda/device/inject.h"

namespace refit::cuda {

class Progress {
 public:
  // The GPU must be current. `rank` decides whether an injected fault belongs to this rank.
  Progress(int rank, cudaStream_t stream);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // The device calls begin_step before a step, and end_step when all ranks have ended it.
  void begin_step();
  void end_step();
  // On the rank's thread, before every launch of a step. `name` is a literal ("qkv"); layer -1 means no layer. With
  // REFIT_CUDA_SYNC=1 it waits for the operation before, so that a failure is thrown (CudaError) under the right name.
  void begin_op(const char* name, int layer = -1);
  // While muted, begin_op does nothing: a capture launches nothing.
  void mute(bool muted) { muted_ = muted; }
  // Whether every launch must be its own: with REFIT_CUDA_SYNC=1, or to inject a fault.
  bool launches_each() const { return sync_ || fault_.kind != Fault::Kind::kNone; }

  // Any thread: "layers.12.qkv", or "between layers.12.qkv and layers.12.down"; empty between steps.
  std::string where() const;

 private:
  struct Op {
    std::atomic<const char*> name{nullptr};
    std::atomic<int> layer{-1};
    std::atomic<bool> boundary{false};
  };
  // More operations than any step has between two boundaries.
  static constexpr uint32_t kOps = 4096;

  void mark(uint32_t number);

  const cudaStream_t stream_;
  const bool sync_;
  Fault fault_;
  std::unique_ptr<Op[]> ops_;          // a ring: operation n is at n % kOps
  std::atomic<uint32_t> issued_{0};    // operations begun on the host since the start; wraps
  std::atomic<uint32_t> ended_{0};     // `issued_` at the end of the last step
  volatile uint32_t* word_ = nullptr;  // pinned: the number of an operation; all operations before it have ended
  uint64_t word_on_gpu_ = 0;
  bool fresh_step_ = true;
  bool inject_ = false;
  bool muted_ = false;
};

}  // namespace refit::cuda
