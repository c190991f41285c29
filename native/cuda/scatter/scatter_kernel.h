// The kernels behind Scatter. Only Scatter uses this.
#pragma once
#include <cuda_runtime_api.h>

#include "cuda/scatter/scatter_plan.h"

namespace refit::cuda {

// A ScatterList on the GPU.
struct ScatterTiles {
  const uint32_t* first_tile;
  const ScatterCopy* copies;
  uint32_t count, tiles;
  uint32_t* counter;  // zero before every launch
};

struct ScatterWork {
  ScatterTiles threads, bulk;
};

// With at most `most_blocks` blocks. The GPU is current; a bulk list needs sm_90. Throws CudaError.
void launch_scatter(const ScatterWork& work, cudaStream_t stream, unsigned most_blocks);

}  // namespace refit::cuda
