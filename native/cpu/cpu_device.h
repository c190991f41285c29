// The CPU as a device: the weight store, the KV cache and the forward pass on one pool of threads.
#pragma once
#include "core/device.h"
#include "core/pool.h"
#include "core/step_queue.h"
#include "core/store.h"
#include "cpu/forward/forward.h"
#include "cpu/kernels.h"

namespace refit::cpu {

class CpuDevice : public Device {
 public:
  explicit CpuDevice(const CoreConfig& config);

  DeviceInfo info() const override;
  using Device::address, Device::checksum, Device::read, Device::scramble, Device::write;
  const void* address(int rank, int param, int set) const override { return store_.param(rank, param, set); }
  // While memory is released, a function that would touch it throws std::runtime_error, because it would take zeros
  // for weights.
  void begin(const StepBatch& batch) override { steps_.begin(batch); }
  void collect(StepResult& result) override { steps_.collect(result); }
  WriteOutcome write(const WriteJob& job, Access access) override;
  void read(int rank, int param, int64_t row, int64_t col, int64_t rows, int64_t cols, uint8_t* out,
            Access access) override;
  std::vector<uint64_t> checksum(const std::vector<Rect>& rects, const std::vector<int64_t>& tensor_cols,
                                 Access access) override;
  void scramble(uint64_t seed, int set) override;
  void copy_weights(const std::vector<Rect>& rects, int from, int to) override;
  uint64_t drop_set(int set) override;
  void restore_set(int set) override;
  uint64_t release_memory(uint32_t tags, bool keep_weights) override;
  bool resume_memory(uint32_t tags) override;

 private:
  void require_available(uint32_t tags) const;
  void require_weights(int set) const;
  void step_now(const StepBatch& batch, StepResult& result);
  // Gated operations wait for steps here only if the gate failed.
  void settle(Access access) {
    if (!access.beside) steps_.settle();
  }
  Pool& pool_of(Access access) { return access.beside ? beside_ : pool_; }

  const Kernels& kernels_;
  Pool pool_;
  Pool beside_{1};  // the caller of an operation beside steps does all of its work
  Store store_;
  Forward forward_;
  uint32_t released_ = 0;  // MemoryTag bits
  // Last: its thread uses the others.
  StepQueue steps_{[this](const StepBatch& batch, StepResult& result) { step_now(batch, result); }};
};

}  // namespace refit::cpu
