// The boundary between the addon and a shared library with its own device (librefit_cuda.so): a table of functions.
//
// Both sides have their own copy of the C++ library, so exceptions, ownership and containers that grow must not
// cross the boundary. Inputs are read only. Results go to a function of the caller while the library still owns them.
// Failures are plain records. Both sides must have been built from the same headers, which `version` and `layout`
// check.
#pragma once
#include <cstdint>
#include <vector>

#include "core/device.h"
#include "core/library/cuda_gpus.h"
#include "core/library/library_call.h"
#include "transport/nccl/nccl_library.h"

namespace refit {

// Increase this with every change of this file that keeps all sizes.
constexpr uint32_t kDeviceLibraryVersion = 13;
constexpr const char* kDeviceLibraryEntry = "refit_device_library";

struct DeviceLibrary {
  uint32_t version;
  uint32_t bytes;  // of this table
  uint64_t layout;

  // All report errors in `failure`, whose kind is kNone on entry.
  void (*gpus)(Sink<CudaGpus> sink, Failure& failure) noexcept;
  void (*memory_plan)(const CoreConfig& config, CudaMemoryPlan& plan, Failure& failure) noexcept;
  // Null on failure.
  Device* (*open)(const CoreConfig& config, Failure& failure) noexcept;
  void (*close)(Device* device) noexcept;
  void (*info)(const Device& device, Sink<DeviceInfo> sink, Failure& failure) noexcept;
  const void* (*address)(const Device& device, int rank, int param, int set) noexcept;
  void (*begin)(Device& device, const StepBatch& batch, Failure& failure) noexcept;
  void (*collect)(Device& device, Sink<StepResult> sink, Failure& failure) noexcept;
  void (*write)(Device& device, const WriteJob& job, Access access, Sink<WriteOutcome> sink, Failure& failure) noexcept;
  void (*read)(Device& device, int rank, int param, int64_t row, int64_t col, int64_t rows, int64_t cols, uint8_t* out,
               Access access, Failure& failure) noexcept;
  void (*checksum)(Device& device, const std::vector<Rect>& rects, const std::vector<int64_t>& tensor_cols,
                   Access access, Sink<std::vector<uint64_t>> sink, Failure& failure) noexcept;
  void (*scramble)(Device& device, uint64_t seed, int set, Failure& failure) noexcept;
  void (*copy_weights)(Device& device, const std::vector<Rect>& rects, int from, int to, Failure& failure) noexcept;
  void (*drop_set)(Device& device, int set, uint64_t& bytes, Failure& failure) noexcept;
  void (*restore_set)(Device& device, int set, Failure& failure) noexcept;
  void (*release_memory)(Device& device, uint32_t tags, bool keep_weights, uint64_t& bytes, Failure& failure) noexcept;
  void (*resume_memory)(Device& device, uint32_t tags, bool& weights_kept, Failure& failure) noexcept;
  void (*close_mappings)(Device& device, const std::string& name, Access access, uint64_t& closed,
                         Failure& failure) noexcept;
  void (*fetch)(Device& device, const Segment& segment, uint64_t offset, uint64_t bytes, int timeout_ms, uint8_t* out,
                Failure& failure) noexcept;
  NcclGroupTable groups;
};

// The library exports `extern "C" const DeviceLibrary* refit_device_library()`.
using DeviceLibraryEntry = const DeviceLibrary* (*)();

// A hash of the sizes of everything that crosses the boundary; it differs if the two sides disagree.
constexpr uint64_t device_library_layout() {
  uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a (Fowler, Noll, Vo), 64 bits
  for (const uint64_t size : {sizeof(DeviceLibrary),
                              sizeof(Failure),
                              sizeof(CoreConfig),
                              sizeof(ModelRecipe),
                              sizeof(Param),
                              sizeof(StepBatch),
                              sizeof(StepResult),
                              sizeof(WriteJob),
                              sizeof(Source),
                              sizeof(Segment),
                              sizeof(Tensor),
                              sizeof(Rect),
                              sizeof(WriteOutcome),
                              sizeof(DeviceInfo),
                              sizeof(CudaGpus),
                              sizeof(CudaGpu),
                              sizeof(CudaFoundLibrary),
                              sizeof(CudaMemoryPlan),
                              sizeof(NcclGroupOptions),
                              sizeof(GroupPart),
                              sizeof(NcclMessage),
                              sizeof(GroupDeadline),
                              sizeof(std::string),
                              sizeof(std::vector<int>)}) {
    hash = (hash ^ size) * 0x100000001b3u;
  }
  return hash;
}

}  // namespace refit
