#include "cuda/weights/write_batches.h"

#include <algorithm>

namespace refit::cuda {
namespace {

// Alignment in the slot of a chunk that does not follow the one before it. The elements of a tensor that begins here
// are then aligned as on the GPU.
constexpr uint64_t kBatchAlignment = 256;

}  // namespace

BatchPlan plan_batches(const WriteJob& job, const std::vector<uint8_t>& read, const std::vector<Param>& shapes,
                       uint64_t slot_bytes, const ChunkLimits& limits) {
  BatchPlan out;
  if (std::find(read.begin(), read.end(), 0) == read.end()) {
    out.plan = plan_write(job, shapes, limits);
  } else if (std::find(read.begin(), read.end(), 1) != read.end()) {
    // The plan keeps the job's indices of rectangles: rectangles of other tensors stay in place, empty.
    WriteJob part;
    part.sources = job.sources;
    part.tensors = job.tensors;
    part.rects = job.rects;
    for (Rect& rect : part.rects) {
      if (read[rect.tensor] == 0) rect.rows = 0;
    }
    out.plan = plan_write(part, shapes, limits);
  }
  const std::vector<Chunk>& chunks = out.plan.chunks;
  out.offsets.resize(chunks.size());
  out.batch_of.resize(chunks.size());
  uint64_t end = 0;         // of the last chunk, in its slot
  uint64_t source_end = 0;  // and in its source
  for (size_t i = 0; i < chunks.size(); i++) {
    const Tensor& tensor = job.tensors[chunks[i].tensor];
    const uint64_t span = chunk_span(chunks[i], tensor);
    const uint64_t start = tensor.at(chunks[i].row, chunks[i].col);
    const bool follows = i > 0 && start == source_end && job.tensors[chunks[i - 1].tensor].source == tensor.source;
    uint64_t offset = follows ? end : (end + kBatchAlignment - 1) / kBatchAlignment * kBatchAlignment;
    if (out.batches.empty() || offset + span > slot_bytes) {
      out.batches.push_back({i, 0});
      offset = 0;
    }
    out.offsets[i] = offset;
    out.batch_of[i] = out.batches.size() - 1;
    out.batches.back().chunks++;
    end = offset + span;
    source_end = start + span;
  }
  return out;
}

Copy2d chunk_copy(const Tensor& tensor, const Chunk& chunk, const Rect& rect, const Param& shape,
                  const uint8_t* chunk_data, Element* param) {
  Rect part = rect;
  part.src_row = std::max(chunk.row, rect.src_row);
  part.rows = std::min(chunk.row + chunk.rows, rect.src_row + rect.rows) - part.src_row;
  part.src_col = std::max(chunk.col, rect.src_col);
  part.cols = std::min(chunk.col + chunk.cols, rect.src_col + rect.cols) - part.src_col;
  part.dst_row += part.src_row - rect.src_row;
  part.dst_col += part.src_col - rect.src_col;
  Copy2d copy = rect_copy(tensor, part, shape, nullptr, param);
  copy.memory = 0;  // the ring
  copy.src = chunk_data + (tensor.at(part.src_row, part.src_col) - tensor.at(chunk.row, chunk.col));
  return copy;
}

Copy2d rect_copy(const Tensor& tensor, const Rect& rect, const Param& shape, const uint8_t* data, Element* param) {
  Copy2d copy{};
  copy.src = data + tensor.at(rect.src_row, rect.src_col);
  copy.dst = param + rect.dst_row * shape.cols + rect.dst_col;
  copy.rows = rect.rows;
  copy.cols = rect.cols;
  copy.src_row_bytes = static_cast<int64_t>(tensor.row_bytes);
  copy.src_col_bytes = static_cast<int64_t>(tensor.rows_are_packed() ? size_of(tensor.dtype) : tensor.col_bytes);
  copy.dst_cols = shape.cols;
  copy.dtype = tensor.dtype;
  copy.memory = tensor.source;
  if (shape.dtype != DType::kFloat32) return copy;
  // float32 to float32 (GpuStore::write refuses others): the bytes as elements of twice the number, unconverted.
  copy.dst = param + 2 * (rect.dst_row * shape.cols + rect.dst_col);
  copy.cols *= 2;
  copy.dst_cols *= 2;
  copy.src_col_bytes = sizeof(Element);
  copy.dtype = kElementType;
  return copy;
}

}  // namespace refit::cuda
