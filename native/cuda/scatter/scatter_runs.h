// Copies that move one contiguous run of bytes unchanged. For long runs a copy engine is faster than a kernel.
#pragma once
#include <cstdint>
#include <vector>

#include "cuda/scatter/scatter.h"

namespace refit::cuda {

struct ByteRun {
  const uint8_t* src;
  uint8_t* dst;
  uint64_t bytes;
};

// The length of a copy that is one contiguous run in source and target; else 0.
uint64_t run_bytes(const Copy2d& copy);
// The inverse.
Copy2d copy_of(const ByteRun& run);

struct SplitCopies {
  std::vector<ByteRun> runs;
  std::vector<Copy2d> rest;
};

// Splits off runs of at least `least` bytes; `rest` keeps the others, in order. Copies next to each other in the list
// that are adjacent in source and target, in one source allocation, are joined, in `rest` as well.
SplitCopies split_runs(const std::vector<Copy2d>& copies, uint64_t least);

}  // namespace refit::cuda
