// GPUs of a CUDA device as process groups use them.
#pragma once
#include <memory>
#include <string>

#include "cuda/group/group_gpu.h"

namespace refit::cuda {

// A thread, streams and events of its own on the GPU, for tensor-parallel rank `rank`. It allocates: no rank may run a
// step meanwhile. Throws CudaError, DeviceLost.
std::unique_ptr<GroupGpu> open_group_gpu(int rank, int device);

}  // namespace refit::cuda
