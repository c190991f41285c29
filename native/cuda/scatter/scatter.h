// The batched scatter that every update ends in: one launch per rank runs a list of strided copies with conversion to
// bf16, from this GPU, a peer or pinned host memory. Long runs of bytes from this GPU go by its own copy.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "core/dtype.h"
#include "cuda/device/types.h"

namespace refit::cuda {

// rows x cols elements; source element (r, c) is at src + r * src_row_bytes + c * src_col_bytes, target element at
// dst + (r * dst_cols + c) * 2. Any address and any strides from 0 up of the source.
struct Copy2d {
  const void* src;
  bf16* dst;
  int64_t rows, cols;
  int64_t src_row_bytes, src_col_bytes;
  int64_t dst_cols;  // elements from row to row of the parameter
  DType dtype;
  // What the source lies in: no copy of the GPU's own is asked to reach from one allocation into another, also where
  // that begins at the next address.
  int memory = 0;
};

// One per rank. The list is cut into tiles of equal work on the host, copied to the GPU through an own pinned ring
// (several lists may be under way), and run by one launch, or one for every kScatterCopies copies.
class Scatter {
 public:
  // Bytes of the target that a block takes at a time, about.
  static constexpr uint32_t kTileBytes = 32 << 10;
  // Runs from here on go by cudaMemcpyAsync: 97 % of its own rate at this length, where the kernel has 95, and 89 at a
  // quarter of it (H200).
  static constexpr uint64_t kLongRun = 256 << 20;

  // The GPU must be current, here and below. `bulk`: on GPUs from sm_90 on, long rows go by bulk copies through
  // shared memory. `long_run`: of sources on the same GPU. Throws CudaError.
  explicit Scatter(uint32_t tile_bytes = kTileBytes, bool bulk = true, uint64_t long_run = kLongRun);
  ~Scatter();
  Scatter(const Scatter&) = delete;
  Scatter& operator=(const Scatter&) = delete;

  // Enqueues all of it on `stream`; returns before it has run. Source memory must stay until the stream has passed it.
  // No two copies may overlap in their targets. `from_host`: sources are in pinned host memory.
  void run(const std::vector<Copy2d>& copies, cudaStream_t stream, bool from_host = false);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Copies of one launch.
constexpr uint32_t kScatterCopies = 24 << 10;

}  // namespace refit::cuda
