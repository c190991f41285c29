// The half of a write that uses the ring: reads chunks into slots and copies slots to the GPUs.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/fault.h"
#include "cuda/device/check.h"
#include "cuda/scatter/scatter_runs.h"
#include "cuda/weights/write_run.h"
#include "transport/file_read.h"

namespace refit::cuda {
namespace {

// The scatter kernel takes shorter runs, all of a batch in one launch.
constexpr uint64_t kEngineBytes = 64 << 10;

}  // namespace

void WriteRun::read_chunk(size_t index) {
  const Chunk& chunk = batches_.plan.chunks[index];
  const size_t batch = batches_.batch_of[index];
  if (stop_.load(std::memory_order_relaxed)) return;
  if (job_.cancel != nullptr && job_.cancel->load(std::memory_order_relaxed)) {
    fail(chunk.tensor, "the write was cancelled");
    return;
  }
  if (batch >= ring_.slots()) {
    // Chunks are taken in order, so all chunks of the batch that holds the slot are read or being read: the ranks will
    // free it.
    std::unique_lock lock(mutex_);
    readers_wake_.wait(
        lock, [&] { return stop_ || *std::min_element(retired_.begin(), retired_.end()) + ring_.slots() > batch; });
    if (stop_) return;
  }
  if (!fetch(chunk, ring_.slot(batch) + batches_.offsets[index])) return;
  if (chunks_left_[batch].fetch_sub(1, std::memory_order_acq_rel) == 1) {
    { const std::lock_guard lock(mutex_); }
    ranks_wake_.notify_all();
  }
}

bool WriteRun::fetch(const Chunk& chunk, uint8_t* slot) {
  const Tensor& tensor = job_.tensors[chunk.tensor];
  const Source& source = job_.sources[tensor.source];
  const uint64_t start = tensor.at(chunk.row, chunk.col);
  const uint64_t wanted = chunk_span(chunk, tensor);
  if (REFIT_FAULT(kRead)) {
    fail(chunk.tensor, "injected fault: read");
    return false;
  }
  if (source.fd < 0) {
    std::memcpy(slot, source.data + start, wanted);
    bytes_.fetch_add(static_cast<uint64_t>(chunk.rows * chunk.cols) * size_of(tensor.dtype), std::memory_order_relaxed);
    return true;
  }
  const ReadResult result = read_at(source.fd, start, slot, wanted);
  bytes_.fetch_add(result.bytes, std::memory_order_relaxed);
  if (result.ok(wanted)) return true;
  const std::string at = std::to_string(start + result.bytes);
  if (result.error != 0) {
    fail(chunk.tensor, "read at byte " + at + ": " + strerror(result.error));
  } else {
    const uint64_t end = tensor.at(tensor.rows - 1, tensor.cols - 1) + size_of(tensor.dtype);
    fail(chunk.tensor, "file ended at byte " + at + ", expected " + std::to_string(end));
  }
  return false;
}

// False if no batch will come.
bool WriteRun::await_batch(size_t batch) {
  std::unique_lock lock(mutex_);
  ranks_wake_.wait(lock,
                   [&] { return chunks_left_[batch].load(std::memory_order_acquire) == 0 || stop_ || !reading_; });
  return chunks_left_[batch].load(std::memory_order_acquire) == 0 && !stop_;
}

// Waits until the GPU has passed the rank's part of a batch.
void WriteRun::retire(Rank& rank, size_t batch) {
  RankWriter& writer = *writers_[static_cast<size_t>(rank.index)];
  const size_t slot = batch % ring_.slots();
  rank.doing("weights: copies from the ring");
  check(cudaEventSynchronize(writer.copied[slot]), "weights: copies from the ring");
  rank.doing("weights: scatter from the ring");
  check(cudaEventSynchronize(writer.scattered[slot]), "weights: scatter from the ring");
  {
    const std::lock_guard lock(mutex_);
    retired_[static_cast<size_t>(rank.index)] = batch + 1;
  }
  readers_wake_.notify_all();
}

bool WriteRun::enqueue(Rank& rank, size_t batch) {
  rank.doing("weights: copies from the ring");
  RankWriter& writer = *writers_[static_cast<size_t>(rank.index)];
  const size_t slot = batch % ring_.slots();
  const Batch& range = batches_.batches[batch];
  std::vector<Copy2d> copies;
  std::vector<int> tensors;
  bool going = true;
  for (size_t i = range.first_chunk; i < range.first_chunk + range.chunks && going; i++) {
    const Chunk& chunk = batches_.plan.chunks[i];
    const Tensor& tensor = job_.tensors[chunk.tensor];
    const uint8_t* data = ring_.slot(batch) + batches_.offsets[i];
    for (size_t k = 0; k < chunk.rects && going; k++) {
      const Rect& rect = job_.rects[batches_.plan.rects[chunk.first_rect + k]];
      if (rect.rank != rank.index) continue;
      if (REFIT_FAULT(kCopy)) {
        fail(chunk.tensor, "injected fault: copy");
        going = false;
        break;
      }
      copies.push_back(
          chunk_copy(tensor, chunk, rect, params_.shapes[rect.param], data, params_.at(rect.rank, rect.param)));
      tensors.push_back(chunk.tensor);
    }
  }
  for (const int t : tensors) dirty_[t].store(true, std::memory_order_relaxed);
  uint64_t bytes = 0;
  for (const Copy2d& copy : copies) bytes += static_cast<uint64_t>(copy.rows * copy.cols) * sizeof(Element);
  paces_[static_cast<size_t>(rank.index)].wait(bytes);
  const SplitCopies split = split_runs(copies, kEngineBytes);
  for (const ByteRun& run : split.runs) {
    check(cudaMemcpyAsync(run.dst, run.src, run.bytes, cudaMemcpyHostToDevice, rank.copy), "weights: a copy");
  }
  check(cudaEventRecord(writer.copied[slot], rank.copy), "weights: copies from the ring");
  writer.scatter.run(split.rest, rank.stream, true);
  check(cudaEventRecord(writer.scattered[slot], rank.stream), "weights: scatter from the ring");
  for (const int t : tensors) left_[t].fetch_sub(1, std::memory_order_relaxed);
  return going;
}

}  // namespace refit::cuda
