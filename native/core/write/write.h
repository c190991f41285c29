// A weight write: tensors inside sources, and the rectangles of them that go into parameters (WriteJob of
// src/native/write-job.ts).
#pragma once
#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.h"

namespace refit {

// Memory of a GPU that another process shares by CUDA IPC (CudaSegment of src/native/write-job.ts).
struct Segment {
  std::string uuid;             // of the exporter's GPU, as CudaGpu::uuid
  std::vector<uint8_t> handle;  // cudaIpcMemHandle_t, 64 bytes; empty: blocks
  uint64_t block_bytes = 0;     // of physical blocks of equal size, mapped one after another:
  std::vector<int> fds;         // a descriptor of this process for each,
  std::vector<uint8_t> fabric;  // or a CUmemFabricHandle for each, 64 bytes
  std::vector<uint8_t> events;  // cudaIpcEventHandle_t, 64 bytes each: done before the first read
  std::string keep;             // not empty: stays open under this name

  static constexpr size_t kHandleBytes = 64;
  size_t blocks() const { return fds.empty() ? fabric.size() / kHandleBytes : fds.size(); }
};

// A file (fd >= 0), host memory, memory of a GPU, memory that is opened for the write (segment >= 0), or a copy of the
// same bytes on each rank's GPU (rank_data).
struct Source {
  int fd = -1;
  const uint8_t* data = nullptr;
  uint64_t bytes = 0;  // of memory; files are bounded by their own end
  int gpu = -1;        // the runtime ordinal of the GPU that `data` is on, for every rank to read; -1: host memory
  int segment = -1;    // in WriteJob.segments; offsets count from its first byte
  std::vector<const uint8_t*> rank_data{};  // not empty: for each rank, `bytes` of memory on its own GPU

  bool on_gpu() const { return gpu >= 0 || segment >= 0 || !rank_data.empty(); }
  // The first byte for a rank, if the source is memory.
  const uint8_t* of(int rank) const { return rank_data.empty() ? data : rank_data[static_cast<size_t>(rank)]; }
};

// A matrix with strides: rows of a file, a transposed or a stepped view.
struct Tensor {
  int source = 0;
  uint64_t offset = 0;  // bytes, of element [0, 0]
  DType dtype = DType::kBFloat16;
  int64_t rows = 0;
  int64_t cols = 0;
  uint64_t row_bytes = 0;  // from row to row
  uint64_t col_bytes = 0;  // from column to column: the element's size if a row's elements are adjacent

  bool rows_are_packed() const { return cols <= 1 || col_bytes == size_of(dtype); }
  // The byte offset of element [row, col] from the start of the source.
  uint64_t at(int64_t row, int64_t col) const {
    return offset + static_cast<uint64_t>(row) * row_bytes + static_cast<uint64_t>(col) * col_bytes;
  }
};

// rows x cols elements of tensor, from [src_row, src_col], to [dst_row, dst_col] of one rank's parameter.
struct Rect {
  int tensor = 0;
  int rank = 0;
  int param = 0;
  int64_t src_row = 0, src_col = 0;
  int64_t rows = 0, cols = 0;
  int64_t dst_row = 0, dst_col = 0;
};

struct WriteJob {
  std::vector<Source> sources;
  std::vector<Segment> segments;
  std::vector<Tensor> tensors;
  std::vector<Rect> rects;  // sorted by tensor
  // Another thread sets it to make the write stop soon and fail. May be null; outlives the write.
  const std::atomic<bool>* cancel = nullptr;
  int event_timeout_ms = 60000;  // the time until all events of the segments must be done
};

enum class TensorState : uint8_t { kUntouched = 0, kPartial = 1, kWritten = 2 };

struct WriteOutcome {
  std::vector<uint8_t> states;  // TensorState of each tensor
  uint64_t bytes = 0;           // taken from sources
  std::string error;            // empty: all written
  int error_tensor = -1;
  // Mappings of segments, counted for each rank. Those that are kept are closed by a later call.
  uint64_t segments_opened = 0;
  uint64_t segments_closed = 0;
  std::string warning;  // not empty: the write succeeded, but something is still open
};

}  // namespace refit
