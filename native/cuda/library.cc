// The table that the addon finds in librefit_cuda.so.
#include "core/device_table.h"
#include "cuda/cards.h"
#include "cuda/device.h"
#include "cuda/memory.h"

namespace refit::cuda {
namespace {

using device_table::guarded;

void cards(Sink<CudaCards> sink, Failure& failure) noexcept {
  guarded(failure, [&] { sink.take(sink.context, find_cards()); });
}

void memory_plan(const CoreConfig& config, CudaMemoryPlan& plan, Failure& failure) noexcept {
  guarded(failure, [&] { plan = plan_memory(config); });
}

Device* open(const CoreConfig& config, Failure& failure) noexcept {
  Device* device = nullptr;
  guarded(failure, [&] { device = new CudaDevice(config); });
  return device;
}

constexpr DeviceLibrary kTable = device_table::make(cards, memory_plan, open);

}  // namespace
}  // namespace refit::cuda

extern "C" __attribute__((visibility("default"))) const refit::DeviceLibrary* refit_device_library() {
  return &refit::cuda::kTable;
}
