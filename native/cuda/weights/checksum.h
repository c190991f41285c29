// Partial checksums (docs/checksum.md) on a GPU; the values equal those of core/checksum.h.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "cuda/device/types.h"

namespace refit::cuda {

// rows x cols elements of a parameter with `pitch` elements from row to row. Element (r, c) is number
// first + r * tensor_cols + c of the checkpoint tensor.
struct SumRect {
  const Element* data;
  int64_t rows, cols, pitch;
  uint64_t first;
  int64_t tensor_cols;
};

// One object per rank.
class Checksum {
 public:
  // The GPU must be current, here and below. Throws CudaError.
  Checksum();
  ~Checksum();
  Checksum(const Checksum&) = delete;
  Checksum& operator=(const Checksum&) = delete;

  // The sum of each rectangle. Waits for the stream.
  std::vector<uint64_t> run(const std::vector<SumRect>& rects, cudaStream_t stream);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace refit::cuda
