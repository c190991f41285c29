// Memory that processes share through CUDA: cudaIpcMemHandle_t, expandable segments, events.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "cuda/device/driver.h"
#include "cuda/device/rank.h"
#include "transport/ipc/ipc_driver.h"

namespace refit::cuda {

// The reason of the driver's refusal, as far as its code shows it. `visible`: this process sees the exporter's GPU.
ipc::Cause cause_of(CUresult code, bool visible);

class GpuIpc : public ipc::Driver {
 public:
  // The ranks outlive it. Throws CudaError.
  explicit GpuIpc(std::vector<std::unique_ptr<Rank>>& ranks);

  int ranks() const override { return static_cast<int>(ranks_.size()); }
  // Opens on the rank's own GPU, whichever GPU the exporter uses: that GPU then reads over NVLink or PCIe.
  ipc::Mapping open(int rank, const Segment& segment) override;
  void close(int rank, const ipc::Mapping& mapping) override;
  uint64_t open_event(int rank, const uint8_t* handle) override;
  bool event_done(int rank, uint64_t event) override;
  void close_event(int rank, uint64_t event) override;
  // A rank on that GPU, else the first rank.
  int nearest(const std::string& uuid) const;

 private:
  ipc::Mapping open_handle(const Segment& segment, bool visible);
  ipc::Mapping open_blocks(int device, const Segment& segment, bool visible);

  std::vector<std::unique_ptr<Rank>>& ranks_;
  std::vector<CUcontext> contexts_;  // each rank's
  std::vector<std::string> gpus_;    // UUIDs of the visible GPUs, by ordinal
};

}  // namespace refit::cuda
