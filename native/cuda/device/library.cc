// The table of functions that the addon finds in librefit_cuda.so.
#include <algorithm>

#include "core/library/device_table.h"
#include "cuda/device/device.h"
#include "cuda/device/gpus.h"
#include "cuda/device/memory.h"
#include "cuda/group/group.h"
#include "cuda/group/group_library.h"

namespace refit::cuda {
namespace {

using device_table::guarded;

void gpus(Sink<CudaGpus> sink, Failure& failure) noexcept {
  guarded(failure, [&] { sink.take(sink.context, find_gpus()); });
}

void memory_plan(const CoreConfig& config, CudaMemoryPlan& plan, Failure& failure) noexcept {
  guarded(failure, [&] { plan = plan_memory(config); });
}

Device* open(const CoreConfig& config, Failure& failure) noexcept {
  Device* device = nullptr;
  guarded(failure, [&] { device = new CudaDevice(config); });
  return device;
}

void unique_id(const std::string& library, uint8_t* id, Failure& failure) noexcept {
  guarded(failure, [&] {
    const std::vector<uint8_t> bytes = nccl_group_id(library);
    std::copy(bytes.begin(), bytes.end(), id);
  });
}

constexpr DeviceLibrary kTable = device_table::make(gpus, memory_plan, open, unique_id);

}  // namespace
}  // namespace refit::cuda

extern "C" __attribute__((visibility("default"))) const refit::DeviceLibrary* refit_device_library() {
  return &refit::cuda::kTable;
}
