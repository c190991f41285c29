// Cuts a write into batches for a ring of slots: plain host arithmetic, without a GPU.
//
// A batch is the content of one slot: chunks (core/write/write_plan.h) of the sources that are read, in order.
#pragma once
#include <cstdint>
#include <vector>

#include "core/write/write_plan.h"
#include "cuda/scatter/scatter.h"

namespace refit::cuda {

struct Batch {
  size_t first_chunk = 0, chunks = 0;
};

struct BatchPlan {
  WritePlan plan;
  std::vector<uint64_t> offsets;  // of each chunk in its slot
  std::vector<size_t> batch_of;   // the batch of each chunk
  std::vector<Batch> batches;
};

// Size of one read: long enough to hide the cost of the system call, short enough for many threads to share a slot.
constexpr ChunkLimits kBatchLimits{2 << 20, 2 << 20, 4 << 20};

// Plans the rectangles of the tensors for which `read` is set. A slot has room for limits.row + limits.straight.
BatchPlan plan_batches(const WriteJob& job, const std::vector<uint8_t>& read, const std::vector<Param>& shapes,
                       uint64_t slot_bytes, const ChunkLimits& limits = kBatchLimits);

// The part of the chunk that the rectangle needs; the chunk's first byte is at `chunk_data`, `param` is the rectangle's
// parameter.
Copy2d chunk_copy(const Tensor& tensor, const Chunk& chunk, const Rect& rect, const Param& shape,
                  const uint8_t* chunk_data, Element* param);
// The whole rectangle from a source at `data`.
Copy2d rect_copy(const Tensor& tensor, const Rect& rect, const Param& shape, const uint8_t* data, Element* param);

}  // namespace refit::cuda
