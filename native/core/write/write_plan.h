// Cuts a write into pieces of work. Each piece is read once for all ranks that need it.
#pragma once
#include <cstdint>
#include <vector>

#include "core/model.h"
#include "core/write/write.h"

namespace refit {

// Rows [row, row + rows) x columns [col, col + cols) of a tensor: the smallest block around the elements that its
// rectangles need.
struct Chunk {
  int tensor = 0;
  int64_t row = 0, rows = 0;
  int64_t col = 0, cols = 0;
  size_t first_rect = 0, rects = 0;  // in WritePlan.rects
  // The file's bytes are the parameter's bytes, in order. They are read straight into the first rectangle and copied
  // from there to the others.
  bool straight = false;
};

struct WritePlan {
  std::vector<Chunk> chunks;         // in the order of the tensors, front to back
  std::vector<int> rects;            // indices into WriteJob.rects, chunk by chunk
  std::vector<int64_t> chunks_left;  // per tensor, how many chunks it has
  uint64_t scratch = 0;              // the most bytes that a chunk stages
};

// The number of bytes from the first to the last byte of the chunk in its source.
uint64_t chunk_span(const Chunk& chunk, const Tensor& tensor);

// The most bytes that a chunk spans; a single element may be larger.
struct ChunkLimits {
  // Straight reads are long, which saves system calls. Staged ones fit a core's second-level cache, so the
  // scatter reads from there and staging costs no memory bandwidth.
  uint64_t straight = 2 << 20;
  uint64_t staged = 256 << 10;
  // A single row longer than this is cut by columns (into pieces of `straight`).
  uint64_t row = 4 << 20;
};

WritePlan plan_write(const WriteJob& job, const std::vector<Param>& params, const ChunkLimits& limits = {});

}  // namespace refit
