// The addon's side of librefit_cuda.so and librefit_cuda_fp16.so. A library is opened on the first request for a GPU
// and stays open for the life of the process.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "core/device.h"
#include "core/fault.h"
#include "core/library/cuda_gpus.h"

namespace refit {

// $REFIT_CUDA_LIBRARY, else librefit_cuda.so beside the file that this code is in; for float16 the file beside it whose
// name ends in "_fp16.so".
std::string cuda_library_path(DType dtype = DType::kBFloat16);

// All throw std::runtime_error if the library is missing, cannot be opened or is of another build. The message has the
// path and advice. Any thread may call them.
//
// Throws std::invalid_argument (bad configuration), NoMemory, DeviceLost.
std::unique_ptr<Device> make_cuda_device(const CoreConfig& config);
CudaMemoryPlan cuda_memory_plan(const CoreConfig& config);
// NcclGroup::kIdBytes bytes, for a group whose first rank is in this process. Throws GroupError.
std::vector<uint8_t> nccl_unique_id(const std::string& library);
// Never throws because there are no GPUs: `error` has the reason, also if the library is missing.
CudaGpus cuda_gpus();

#ifdef REFIT_FAULTS
// Arms a fault point of the library, if it is open and was built with them; `at` 0 disarms. The two sides have
// separate points. A library built for tests exports `refit_arm_fault`, with the arguments of fault::arm.
void arm_cuda_library(fault::Point point, int64_t at, fault::Action action, int stall_ms);
#endif

}  // namespace refit
