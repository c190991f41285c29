// NVIDIA GPUs as a device: one rank on each GPU, arenas by tag, the forward pass and the weight store on top.
#pragma once
#include <deque>
#include <memory>

#include "core/device.h"
#include "cuda/device/watchdog.h"

namespace refit::cuda {

class CudaDevice : public Device {
 public:
  // Checks everything before it allocates anything. Throws std::invalid_argument (bad configuration), NoMemory,
  // std::runtime_error (no driver, no such GPU, GPUs that do not reach each other), DeviceLost.
  explicit CudaDevice(const CoreConfig& config);
  // If a GPU was lost, everything that the ranks use stays allocated: they may be stuck in it.
  ~CudaDevice() override;

  DeviceInfo info() const override;
  const void* address(int rank, int param, int set) const override;
  // While memory is released, a call that would touch it throws std::runtime_error. All of these throw DeviceLost.
  void begin(const StepBatch& batch) override;
  void collect(StepResult& result) override;
  using Device::address, Device::checksum, Device::read, Device::scramble, Device::write;
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
  uint64_t close_mappings(const std::string& name, Access access) override;
  void fetch(const Segment& segment, uint64_t offset, uint64_t bytes, int timeout_ms, uint8_t* out) override;
  std::unique_ptr<NcclGroup> nccl_group(const NcclGroupOptions& options) override;

  struct State;  // device_state.h

 private:
  std::shared_ptr<State> state_;
  Watchdog& watchdog(Access access) { return access.beside ? *beside_watchdog_ : *watchdog_; }

  struct Begun {
    std::shared_ptr<StepResult> result;
    std::shared_ptr<Watchdog::Task> task;
  };
  std::deque<Begun> begun_;
  std::unique_ptr<Watchdog> watchdog_;
  std::unique_ptr<Watchdog> beside_watchdog_;
};

}  // namespace refit::cuda
