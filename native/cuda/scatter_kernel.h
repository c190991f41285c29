// The kernel behind Scatter, with what can be tuned about it. Only Scatter, its tests and its benchmark use this.
#pragma once
#include <cuda_runtime_api.h>

#include "cuda/scatter_plan.h"

namespace refit::cuda {

struct ScatterTuning {
  int threads = 512;      // of a block, for ordinary loads and stores: 256 or 512
  int unroll = 4;         // 16-byte loads in flight per thread: 4 or 8
  int hint = 0;           // 0: streaming stores; 1: and loads that fetch 256 bytes into L2; 2: plain stores
  int blocks_per_sm = 0;  // at most; 0: as many as fit into 1024 threads
  bool dynamic = true;    // tiles by an atomic counter, else in turn
  uint32_t tile_bytes = 64 << 10;
  int bulk_stages = 0;             // 0: no bulk copies; 4 or 6 (sm_90 and later)
  uint32_t bulk_bytes = 16 << 10;  // of a stage
};

// A ScatterList on the card.
struct ScatterTiles {
  const uint32_t* first_tile;
  const ScatterCopy* copies;
  uint32_t count, tiles;
};

struct ScatterWork {
  ScatterTiles threads, bulk;
  // Zero before every launch.
  uint32_t *thread_counter, *bulk_counter;
};

// The card is current. Throws std::invalid_argument for a tuning that is not built, CudaError.
void launch_scatter(const ScatterWork& work, const ScatterTuning& tuning, cudaStream_t stream);

}  // namespace refit::cuda
