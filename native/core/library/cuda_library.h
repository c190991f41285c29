// The addon's side of librefit_cuda.so: opened on the first request for a GPU, then kept for the life of the process.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "core/device.h"
#include "core/fault.h"
#include "core/library/cuda_gpus.h"

namespace refit {

// $REFIT_CUDA_LIBRARY, else librefit_cuda.so beside the file that this code is in.
std::string cuda_library_path();

// All throw std::runtime_error where the library is missing, does not open or is of another build; the message has the
// path and says what to do. Any thread.
//
// Throws std::invalid_argument (bad configuration), NoMemory, DeviceLost.
std::unique_ptr<Device> make_cuda_device(const CoreConfig& config);
CudaMemoryPlan cuda_memory_plan(const CoreConfig& config);
// NcclGroup::kIdBytes for a group in which a rank of this process is the first. Throws GroupError.
std::vector<uint8_t> nccl_unique_id(const std::string& library);
// Never throws for a lack of GPUs: `error` reports it, also where the library is missing.
CudaGpus cuda_gpus();

#ifdef REFIT_FAULTS
// Arms a fault point of the library, if it is open and was built with them; `at` 0 disarms. The two sides have their
// own points: a library built for tests gives its out as `refit_arm_fault`, with fault::arm's arguments.
void arm_cuda_library(fault::Point point, int64_t at, fault::Action action, int stall_ms);
#endif

}  // namespace refit
