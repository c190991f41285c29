// Copies that move bytes as they are, from one place to another in one piece: what a copy engine does better than a
// kernel, where they are long.
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

// The bytes of a copy that is one run of bytes from and to; else 0.
uint64_t run_bytes(const Copy2d& copy);
// The other way.
Copy2d copy_of(const ByteRun& run);

struct SplitCopies {
  std::vector<ByteRun> runs;
  std::vector<Copy2d> rest;
};

// Runs of at least `least` bytes, and what is left, in order. Neighbours in the list that follow each other on both
// sides, in one memory of the sources, are joined, in `rest` as well.
SplitCopies split_runs(const std::vector<Copy2d>& copies, uint64_t least);

}  // namespace refit::cuda
