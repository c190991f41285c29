// The batched scatter at the end of every update: one launch per rank runs a list of strided copies with conversion to
// Element, from this GPU, peers or pinned host memory. The GPU's copy engine takes long runs of bytes on this GPU.
// Copies from peers have a launch of their own beside the others: the links and this GPU's memory work at the same
// time.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "core/dtype.h"
#include "cuda/device/types.h"

namespace refit::cuda {

// rows x cols elements; source element (r, c) is at src + r * src_row_bytes + c * src_col_bytes, target element at
// dst + (r * dst_cols + c) * 2. The source may have any address and any strides from 0 up.
struct Copy2d {
  const void* src;
  Element* dst;
  int64_t rows, cols;
  int64_t src_row_bytes, src_col_bytes;
  int64_t dst_cols;  // elements from one row of the parameter to the next
  DType dtype;
  // Names the allocation of the source: no copy of the copy engine may reach from one allocation into another, even if
  // the other begins at the next address.
  int memory = 0;
};

// One per rank. The host cuts the list into tiles of equal work and copies it to the GPU through a pinned ring of its
// own (several lists may be pending). One launch runs it, or one for every kScatterCopies copies.
class Scatter {
 public:
  // Approximate target bytes that a block takes at a time.
  static constexpr uint32_t kTileBytes = 32 << 10;
  // Runs of at least this length use cudaMemcpyAsync. At this length it reaches 97 % of its own rate and the kernel 95
  // %; at a quarter of it 89 % (H200).
  static constexpr uint64_t kLongRun = 256 << 20;

  // The GPU must be current, here and below. `bulk`: on GPUs from sm_90 on, long rows use bulk copies through shared
  // memory. `long_run`: for sources on the same GPU. Throws CudaError.
  explicit Scatter(uint32_t tile_bytes = kTileBytes, bool bulk = true, uint64_t long_run = kLongRun);
  ~Scatter();
  Scatter(const Scatter&) = delete;
  Scatter& operator=(const Scatter&) = delete;

  // Enqueues all copies on `stream` and returns before they have run. Source memory must stay until the stream has
  // passed them. Targets must not overlap. `from_host`: sources are in pinned host memory.
  void run(const std::vector<Copy2d>& copies, cudaStream_t stream, bool from_host = false);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Maximum number of copies in one launch.
constexpr uint32_t kScatterCopies = 24 << 10;

}  // namespace refit::cuda
