// The CPU as a device: the weight store, the KV cache and the forward pass on one pool of threads.
#pragma once
#include "core/device.h"
#include "core/pool.h"
#include "core/store.h"
#include "cpu/forward.h"
#include "cpu/kernels.h"

namespace refit::cpu {

class CpuDevice : public Device {
 public:
  explicit CpuDevice(const CoreConfig& config);

  DeviceInfo info() const override;
  const void* address(int rank, int param) const override { return store_.param(rank, param); }
  void step(const StepBatch& batch, StepResult& result) override { forward_.step(batch, result); }
  WriteOutcome write(const WriteJob& job) override { return store_.write(job, pool_); }
  void read(int rank, int param, int64_t row, int64_t col, int64_t rows, int64_t cols, uint8_t* out) override;
  std::vector<uint64_t> checksum(const std::vector<Rect>& rects, const std::vector<int64_t>& tensor_cols) override;
  void scramble(uint64_t seed) override { store_.scramble(seed, pool_); }

 private:
  const Kernels& kernels_;
  Pool pool_;
  Store store_;
  Forward forward_;
};

}  // namespace refit::cpu
