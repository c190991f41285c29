// A device: the ranks of one engine with their parameters, KV pages and forward pass. The CPU is one, CUDA another; the
// binding and everything above it talk to this alone.
//
// Threads: `step` is called by the scheduler's thread. `write`, `read`, `checksum` and `scramble` are called by the
// core's writer thread while the scheduler stands still (the gate). The two never overlap.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "core/model.h"
#include "core/step.h"
#include "core/write.h"

namespace refit {

struct DeviceInfo {
  std::string isa;
  int threads = 0;
  uint64_t weight_bytes = 0;
  uint64_t kv_bytes = 0;
};

class Device {
 public:
  virtual ~Device() = default;
  virtual DeviceInfo info() const = 0;
  // Fixed for the life of the device.
  virtual const void* address(int rank, int param) const = 0;
  // Throws std::invalid_argument on a malformed batch.
  virtual void step(const StepBatch& batch, StepResult& result) = 0;
  // The job's bounds have been checked. Never throws for an I/O fault: the outcome tells.
  virtual WriteOutcome write(const WriteJob& job) = 0;
  // Row-major stored bytes of [row, row + rows) x [col, col + cols).
  virtual void read(int rank, int param, int64_t row, int64_t col, int64_t rows, int64_t cols, uint8_t* out) = 0;
  // Partial checksum of each rectangle; tensor_cols[rect.tensor] gives the checkpoint tensor's columns.
  virtual std::vector<uint64_t> checksum(const std::vector<Rect>& rects, const std::vector<int64_t>& tensor_cols) = 0;
  virtual void scramble(uint64_t seed) = 0;
};

// Throws std::invalid_argument (bad configuration) or std::bad_alloc.
std::unique_ptr<Device> make_cpu_device(const CoreConfig& config);

}  // namespace refit
