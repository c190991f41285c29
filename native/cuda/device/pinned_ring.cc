#include "cuda/device/pinned_ring.h"

#include <cuda_runtime_api.h>

#include "cuda/device/check.h"

namespace refit::cuda {

PinnedRing::PinnedRing(size_t slots, size_t slot_bytes) : slots_(slots), slot_bytes_(slot_bytes) {
  check(cudaHostAlloc(reinterpret_cast<void**>(&data_), slots * slot_bytes, cudaHostAllocPortable),
        "cudaHostAlloc(ring)");
}

PinnedRing::~PinnedRing() { cudaFreeHost(data_); }

}  // namespace refit::cuda
