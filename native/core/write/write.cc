// Executes a WriteJob: threads take chunks in file order, read each once and scatter it to every rank.
#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <utility>

#include "core/fault.h"
#include "core/store.h"
#include "core/write/write_convert.h"
#include "core/write/write_plan.h"
#include "transport/file_read.h"

namespace refit {
namespace {

// Rows of a chunk somewhere in memory.
struct Block {
  const uint8_t* data = nullptr;
  uint64_t pitch = 0;
};

class Writer {
 public:
  Writer(Store& store, int set, const WriteJob& job, WritePlan plan)
      : store_(store),
        set_(set),
        job_(job),
        plan_(std::move(plan)),
        left_(std::make_unique<std::atomic<int64_t>[]>(job.tensors.size())),
        dirty_(std::make_unique<std::atomic<bool>[]>(job.tensors.size())) {
    for (size_t t = 0; t < job.tensors.size(); t++) left_[t] = plan_.chunks_left[t];
  }

  void run(Pool& pool) {
    if (plan_.scratch > 0) {
      // All memory is allocated before the first byte is written, so a lack of memory changes nothing.
      if (REFIT_FAULT(kAlloc)) throw std::bad_alloc();
      scratch_ = Arena(static_cast<size_t>(pool.threads()) * Arena::padded(plan_.scratch));
    }
    pool.parallel_for(static_cast<int64_t>(plan_.chunks.size()), [this](int64_t index, int thread) {
      if (stop_.load(std::memory_order_relaxed)) return;
      const Chunk& chunk = plan_.chunks[index];
      if (job_.cancel != nullptr && job_.cancel->load(std::memory_order_relaxed)) {
        fail(chunk.tensor, "the write was cancelled");
      } else if (run_chunk(chunk, thread)) {
        left_[chunk.tensor].fetch_sub(1, std::memory_order_relaxed);
      }
    });
  }

  WriteOutcome outcome() {
    WriteOutcome out;
    out.states.resize(job_.tensors.size());
    for (size_t t = 0; t < out.states.size(); t++) {
      const TensorState state = left_[t] == 0 ? TensorState::kWritten
                                : dirty_[t]   ? TensorState::kPartial
                                              : TensorState::kUntouched;
      out.states[t] = static_cast<uint8_t>(state);
    }
    out.bytes = bytes_;
    out.error = error_;
    out.error_tensor = error_tensor_;
    return out;
  }

 private:
  bool run_chunk(const Chunk& chunk, int thread) {
    const Tensor& tensor = job_.tensors[chunk.tensor];
    const Source& source = job_.sources[tensor.source];
    const uint64_t start = tensor.at(chunk.row, chunk.col);
    const int* rects = plan_.rects.data() + chunk.first_rect;
    Block block;
    if (source.fd < 0) {
      block = {source.data + start, tensor.row_bytes};
      bytes_.fetch_add(static_cast<uint64_t>(chunk.rows * chunk.cols) * size_of(tensor.dtype),
                       std::memory_order_relaxed);
    } else if (chunk.straight) {
      uint8_t* target = at(job_.rects[rects[0]], chunk.row, chunk.col);
      if (!read(chunk, start, target, true)) return false;
      block = {target, tensor.row_bytes};
    } else {
      uint8_t* target = scratch_.data() + static_cast<size_t>(thread) * Arena::padded(plan_.scratch);
      if (!read(chunk, start, target, false)) return false;
      block = {target, tensor.row_bytes};
    }
    for (size_t i = chunk.straight ? 1 : 0; i < chunk.rects; i++) {
      if (REFIT_FAULT(kCopy)) {
        fail(chunk.tensor, "injected fault: copy");
        return false;
      }
      dirty_[chunk.tensor].store(true, std::memory_order_relaxed);
      scatter(block, chunk, job_.rects[rects[i]]);
    }
    return true;
  }

  bool read(const Chunk& chunk, uint64_t start, uint8_t* target, bool straight) {
    if (REFIT_FAULT(kRead)) {
      fail(chunk.tensor, "injected fault: read");
      return false;
    }
    const Tensor& tensor = job_.tensors[chunk.tensor];
    const uint64_t wanted = chunk_span(chunk, tensor);
    const ReadResult result = read_at(job_.sources[tensor.source].fd, start, target, wanted);
    bytes_.fetch_add(result.bytes, std::memory_order_relaxed);
    if (straight && result.touched) dirty_[chunk.tensor].store(true, std::memory_order_relaxed);
    if (result.ok(wanted)) return true;
    if (result.error != 0) {
      fail(chunk.tensor, "read at byte " + std::to_string(start + result.bytes) + ": " + strerror(result.error));
    } else {
      const uint64_t end = tensor.at(tensor.rows - 1, tensor.cols - 1) + size_of(tensor.dtype);
      fail(chunk.tensor,
           "file ended at byte " + std::to_string(start + result.bytes) + ", expected " + std::to_string(end));
    }
    return false;
  }

  // Copies the part of the chunk that the rectangle needs.
  void scatter(const Block& block, const Chunk& chunk, const Rect& rect) {
    const Tensor& tensor = job_.tensors[chunk.tensor];
    const DType from = tensor.dtype;
    const DType to = store_.shape(rect.param).dtype;
    const Convert convert = converter(from, to);
    const int64_t row = std::max(chunk.row, rect.src_row);
    const int64_t rows = std::min(chunk.row + chunk.rows, rect.src_row + rect.rows) - row;
    const int64_t col = std::max(chunk.col, rect.src_col);
    const int64_t cols = std::min(chunk.col + chunk.cols, rect.src_col + rect.cols) - col;
    const uint8_t* src = block.data + (tensor.at(row, col) - tensor.at(chunk.row, chunk.col));
    uint8_t* dst = at(rect, row, col);
    const uint64_t dst_pitch = static_cast<uint64_t>(store_.shape(rect.param).cols) * size_of(to);
    if (!tensor.rows_are_packed()) {
      for (int64_t r = 0; r < rows; r++) {
        convert_strided(from, to, src + r * block.pitch, tensor.col_bytes, dst + r * dst_pitch, cols);
      }
      return;
    }
    if (block.pitch == static_cast<uint64_t>(cols) * size_of(from) && store_.shape(rect.param).cols == cols) {
      convert(src, dst, rows * cols);
      return;
    }
    for (int64_t r = 0; r < rows; r++) convert(src + r * block.pitch, dst + r * dst_pitch, cols);
  }

  // The address of the tensor's element [row, col] in the rectangle's parameter.
  uint8_t* at(const Rect& rect, int64_t row, int64_t col) {
    const int64_t index =
        (rect.dst_row + row - rect.src_row) * store_.shape(rect.param).cols + rect.dst_col + col - rect.src_col;
    return static_cast<uint8_t*>(store_.param(rect.rank, rect.param, set_)) +
           static_cast<uint64_t>(index) * size_of(store_.shape(rect.param).dtype);
  }

  void fail(int tensor, std::string message) {
    const std::lock_guard lock(mutex_);
    if (error_.empty()) {
      error_ = std::move(message);
      error_tensor_ = tensor;
    }
    stop_.store(true, std::memory_order_relaxed);
  }

  Store& store_;
  const int set_;
  const WriteJob& job_;
  const WritePlan plan_;
  Arena scratch_;
  std::unique_ptr<std::atomic<int64_t>[]> left_;  // chunks of each tensor that are not completely written
  std::unique_ptr<std::atomic<bool>[]> dirty_;    // tensors of which something may have been written
  std::atomic<uint64_t> bytes_ = 0;
  std::atomic<bool> stop_ = false;
  std::mutex mutex_;
  std::string error_;
  int error_tensor_ = -1;
};

WriteOutcome nothing_written(const WriteJob& job, const char* error, int tensor = -1) {
  WriteOutcome out;
  out.error_tensor = tensor;
  out.states.assign(job.tensors.size(), static_cast<uint8_t>(TensorState::kUntouched));
  out.error = error;
  return out;
}

}  // namespace

WriteOutcome Store::write(const WriteJob& job, Pool& pool, int set) {
  for (const Rect& rect : job.rects) {
    const Source& source = job.sources[job.tensors[rect.tensor].source];
    if (source.segment < 0 && source.rank_data.empty()) continue;
    return nothing_written(
        job,
        "its memory is on a GPU, and this engine runs on the CPU: send the tensor from CPU memory, or "
        "run the engine on GPUs",
        rect.tensor);
  }
  std::unique_ptr<Writer> writer;
  try {
    writer = std::make_unique<Writer>(*this, set, job, plan_write(job, shapes_));
    writer->run(pool);
  } catch (const std::bad_alloc&) {
    // Nothing has changed before the first chunk. After it only the text of an error is allocated, so the counts are
    // still right.
    if (writer == nullptr) return nothing_written(job, "no memory for the plan of the write");
    WriteOutcome out = writer->outcome();
    if (out.error.empty()) out.error = "no memory for read buffers";
    return out;
  }
  return writer->outcome();
}

}  // namespace refit
