// Transfers the tables of one launch from the host to the GPU: the layout in pinned memory and on the GPU is the same.
#pragma once
#include <cuda_runtime_api.h>

#include "cuda/scatter/scatter_kernel.h"
#include "cuda/scatter/scatter_plan.h"

namespace refit::cuda {

class ScatterSegment {
 public:
  // Room for kScatterCopies copies in each of two lists. The GPU must be current, here and below. Throws CudaError.
  ScatterSegment();
  ~ScatterSegment();
  ScatterSegment(const ScatterSegment&) = delete;
  ScatterSegment& operator=(const ScatterSegment&) = delete;

  // Waits until the GPU has passed the last mark, then returns empty lists in pinned memory.
  ScatterLists lists();
  // Enqueues the copy of the used part of the lists; it also sets the counters to zero.
  ScatterWork upload(const ScatterLists& lists, cudaStream_t stream);
  // Call it when the launch that uses the segment has been enqueued.
  void mark(cudaStream_t stream);

 private:
  ScatterTiles upload(size_t offset, const ScatterList& list, cudaStream_t stream);

  uint8_t* host_ = nullptr;
  uint8_t* gpu_ = nullptr;
  cudaEvent_t done_ = nullptr;
  bool used_ = false;
};

}  // namespace refit::cuda
