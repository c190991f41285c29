// The GPUs of a CUDA device, for process groups.
#pragma once
#include <memory>
#include <string>

#include "cuda/group/group_gpu.h"

namespace refit::cuda {

// Creates a thread, streams and events on the GPU for tensor-parallel rank `rank`. It allocates, so no rank may run a
// step meanwhile. Throws CudaError, DeviceLost.
std::unique_ptr<GroupGpu> open_group_gpu(int rank, int device);

}  // namespace refit::cuda
