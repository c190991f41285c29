#include "cuda/write_run.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <future>
#include <new>
#include <utility>

#include "core/device.h"
#include "core/fault.h"
#include "cuda/check.h"
#include "transport/file_read.h"

namespace refit::cuda {
namespace {

// Batches that a rank has under way before it waits for the oldest: the card always has the next one in its queue.
constexpr size_t kUnderWay = 4;
// Shorter runs go by the scatter kernel, which takes all of a batch's in one launch.
constexpr uint64_t kEngineBytes = 64 << 10;

}  // namespace

WriteLane::WriteLane(size_t slots) : copied(slots), scattered(slots) {
  for (auto* events : {&copied, &scattered}) {
    for (cudaEvent_t& event : *events) {
      check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    }
  }
}

WriteLane::~WriteLane() {
  for (auto* events : {&copied, &scattered}) {
    for (cudaEvent_t event : *events) cudaEventDestroy(event);
  }
}

WriteRun::WriteRun(const CardParams& params, const WriteJob& job, PinnedRing& ring,
                   std::vector<std::unique_ptr<WriteLane>>& lanes)
    : params_(params), job_(job), ring_(ring), lanes_(lanes), direct_(lanes.size()), retired_(lanes.size()) {
  left_ = std::make_unique<std::atomic<int64_t>[]>(job.tensors.size());
  dirty_ = std::make_unique<std::atomic<bool>[]>(job.tensors.size());
  plan_direct();
  if (!batches_.batches.empty() && REFIT_FAULT(kAlloc)) throw std::bad_alloc();
  chunks_left_ = std::make_unique<std::atomic<int64_t>[]>(batches_.batches.size());
  for (size_t b = 0; b < batches_.batches.size(); b++) {
    chunks_left_[b] = static_cast<int64_t>(batches_.batches[b].chunks);
  }
  for (const Chunk& chunk : batches_.plan.chunks) left_[chunk.tensor] += static_cast<int64_t>(chunk.rects);
}

// Sorts the sources into those that cards read themselves and those that are read into the ring.
void WriteRun::plan_direct() {
  const std::vector<uint8_t> near = find_near();
  std::vector<uint8_t> read(job_.tensors.size());
  for (size_t t = 0; t < read.size(); t++) read[t] = near[job_.tensors[t].source] == 0;
  batches_ = plan_batches(job_, read, params_.shapes, ring_.slot_bytes());
  std::vector<uint64_t> needed(job_.tensors.size());
  for (const Rect& rect : job_.rects) {
    if (rect.rows == 0 || rect.cols == 0 || read[rect.tensor] != 0) continue;
    const Tensor& tensor = job_.tensors[rect.tensor];
    const Source& source = job_.sources[tensor.source];
    direct_[rect.rank].push_back({rect.tensor, rect_copy(tensor, rect, params_.shapes[rect.param], source.data,
                                                         params_.at(rect.rank, rect.param))});
    left_[rect.tensor]++;
    needed[rect.tensor] += static_cast<uint64_t>(rect.rows * rect.cols) * size_of(tensor.dtype);
  }
  // What several ranks need is counted once, as where it is read once.
  for (size_t t = 0; t < needed.size(); t++) {
    const Tensor& tensor = job_.tensors[t];
    bytes_ += std::min(needed[t], static_cast<uint64_t>(tensor.rows * tensor.cols) * size_of(tensor.dtype));
  }
}

// For each source whether all cards can read it. Pinned memory has one address for the host and all cards; both ends of
// a source are asked for, on every card.
std::vector<uint8_t> WriteRun::find_near() {
  std::vector<uint8_t> near(job_.sources.size());
  bool ask = false;
  for (size_t s = 0; s < near.size(); s++) {
    const Source& source = job_.sources[s];
    near[s] = source.fd < 0 && (source.card >= 0 || (source.data != nullptr && source.bytes > 0));
    ask = ask || (near[s] != 0 && source.card < 0);
  }
  if (!ask) return near;
  std::mutex mutex;
  on_all(*params_.ranks, [&](Rank&) {
    for (size_t s = 0; s < near.size(); s++) {
      const Source& source = job_.sources[s];
      if (source.fd >= 0 || source.card >= 0 || source.bytes == 0) continue;
      for (const uint8_t* at : {source.data, source.data + source.bytes - 1}) {
        cudaPointerAttributes attributes{};
        const cudaError_t failed = cudaPointerGetAttributes(&attributes, at);
        if (failed != cudaSuccess) cudaGetLastError();
        if (failed != cudaSuccess || attributes.type != cudaMemoryTypeHost || attributes.devicePointer != at) {
          const std::lock_guard lock(mutex);
          near[s] = 0;
        }
      }
    }
  });
  return near;
}

void WriteRun::run(Pool& pool) {
  std::vector<std::future<void>> futures;
  for (auto& rank : *params_.ranks) {
    futures.push_back(rank->run([this, &rank = *rank] {
      try {
        drain(rank);
      } catch (const std::exception& e) {
        {
          const std::lock_guard lock(mutex_);
          broken_ = true;
        }
        fail(-1, rank.label() + ": " + e.what());
        throw;
      }
    }));
  }
  std::exception_ptr lost;
  try {
    pool.parallel_for(static_cast<int64_t>(batches_.plan.chunks.size()),
                      [this](int64_t index, int) { read_chunk(static_cast<size_t>(index)); });
  } catch (const std::exception& e) {
    fail(-1, e.what());
  }
  {
    const std::lock_guard lock(mutex_);
    reading_ = false;
  }
  ranks_wake_.notify_all();
  // All must have ended before anything that they refer to goes.
  for (auto& future : futures) {
    try {
      future.get();
    } catch (const DeviceLost&) {
      lost = std::current_exception();
    } catch (const std::exception&) {
      // Told by outcome().
    }
  }
  if (lost) std::rethrow_exception(lost);
}

WriteOutcome WriteRun::outcome() const {
  WriteOutcome out;
  out.states.resize(job_.tensors.size());
  for (size_t t = 0; t < out.states.size(); t++) {
    const bool whole = left_[t] == 0 && !(broken_ && dirty_[t]);
    const TensorState state = whole       ? TensorState::kWritten
                              : dirty_[t] ? TensorState::kPartial
                                          : TensorState::kUntouched;
    out.states[t] = static_cast<uint8_t>(state);
  }
  out.bytes = bytes_;
  out.error = error_;
  out.error_tensor = error_tensor_;
  return out;
}

// --- readers: the pool's threads

void WriteRun::read_chunk(size_t index) {
  const Chunk& chunk = batches_.plan.chunks[index];
  const size_t batch = batches_.batch_of[index];
  if (stop_.load(std::memory_order_relaxed)) return;
  if (job_.cancel != nullptr && job_.cancel->load(std::memory_order_relaxed)) {
    fail(chunk.tensor, "the write was cancelled");
    return;
  }
  if (batch >= ring_.slots()) {
    // Chunks are taken in order, so all of the batch that has the slot are read or being read: the ranks will free it.
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

// --- the ranks' threads

void WriteRun::drain(Rank& rank) {
  size_t given = 0;
  size_t& retired = retired_[static_cast<size_t>(rank.index)];  // written by this thread alone, under the mutex
  bool going = run_direct(rank);
  while (going && given < batches_.batches.size()) {
    if (chunks_left_[given].load(std::memory_order_acquire) > 0) {
      if (retired < given) {
        retire(rank, retired);
        continue;
      }
      rank.waiting("weights: waiting for a file");
      if (!await_batch(given)) break;
    }
    going = enqueue(rank, given);
    given++;
    while (given - retired > kUnderWay) retire(rank, retired);
  }
  while (retired < given) retire(rank, retired);
  rank.doing("weights: end of the write");
  check(cudaStreamSynchronize(rank.copy), "weights: copies");
  check(cudaStreamSynchronize(rank.stream), "weights: scatter");
}

// False where none will come.
bool WriteRun::await_batch(size_t batch) {
  std::unique_lock lock(mutex_);
  ranks_wake_.wait(lock,
                   [&] { return chunks_left_[batch].load(std::memory_order_acquire) == 0 || stop_ || !reading_; });
  return chunks_left_[batch].load(std::memory_order_acquire) == 0 && !stop_;
}

// Waits until the cards have passed the rank's share of a batch.
void WriteRun::retire(Rank& rank, size_t batch) {
  WriteLane& lane = *lanes_[static_cast<size_t>(rank.index)];
  const size_t slot = batch % ring_.slots();
  rank.doing("weights: copies from the ring");
  check(cudaEventSynchronize(lane.copied[slot]), "weights: copies from the ring");
  rank.doing("weights: scatter from the ring");
  check(cudaEventSynchronize(lane.scattered[slot]), "weights: scatter from the ring");
  {
    const std::lock_guard lock(mutex_);
    retired_[static_cast<size_t>(rank.index)] = batch + 1;
  }
  readers_wake_.notify_all();
}

// What cards read where it lies. Like all below, false where the write must end.
bool WriteRun::run_direct(Rank& rank) {
  const std::vector<Direct>& all = direct_[static_cast<size_t>(rank.index)];
  bool going = true;
  std::vector<Copy2d> copies;
  copies.reserve(all.size());
  std::vector<int> tensors;
  tensors.reserve(all.size());
  for (const Direct& direct : all) {
    if (job_.cancel != nullptr && job_.cancel->load(std::memory_order_relaxed)) {
      fail(direct.tensor, "the write was cancelled");
      going = false;
    } else if (REFIT_FAULT(kCopy)) {
      fail(direct.tensor, "injected fault: copy");
      going = false;
    }
    if (!going) break;
    copies.push_back(direct.copy);
    tensors.push_back(direct.tensor);
  }
  rank.doing("weights: scatter");
  for (const int t : tensors) dirty_[t].store(true, std::memory_order_relaxed);
  lanes_[static_cast<size_t>(rank.index)]->scatter.run(copies, rank.stream);
  for (const int t : tensors) left_[t].fetch_sub(1, std::memory_order_relaxed);
  return going;
}

// Bytes that go as they are: one copy engine, no kernel.
struct WriteRun::EngineCopy {
  const uint8_t* src;
  uint8_t* dst;
  uint64_t bytes;
};

bool WriteRun::enqueue(Rank& rank, size_t batch) {
  rank.doing("weights: copies from the ring");
  WriteLane& lane = *lanes_[static_cast<size_t>(rank.index)];
  const size_t slot = batch % ring_.slots();
  const Batch& range = batches_.batches[batch];
  std::vector<Copy2d> kernel;
  std::vector<EngineCopy> engine;
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
      const Copy2d copy =
          chunk_copy(tensor, chunk, rect, params_.shapes[rect.param], data, params_.at(rect.rank, rect.param));
      tensors.push_back(chunk.tensor);
      const uint64_t bytes = run_bytes(copy);
      const auto* src = static_cast<const uint8_t*>(copy.src);
      auto* dst = reinterpret_cast<uint8_t*>(copy.dst);
      if (bytes > 0 && !engine.empty() && engine.back().src + engine.back().bytes == src &&
          engine.back().dst + engine.back().bytes == dst) {
        engine.back().bytes += bytes;
      } else if (bytes >= kEngineBytes) {
        engine.push_back({src, dst, bytes});
      } else {
        kernel.push_back(copy);
      }
    }
  }
  for (const int t : tensors) dirty_[t].store(true, std::memory_order_relaxed);
  for (const EngineCopy& copy : engine) {
    check(cudaMemcpyAsync(copy.dst, copy.src, copy.bytes, cudaMemcpyHostToDevice, rank.copy), "weights: a copy");
  }
  check(cudaEventRecord(lane.copied[slot], rank.copy), "weights: copies from the ring");
  lane.scatter.run(kernel, rank.stream);
  check(cudaEventRecord(lane.scattered[slot], rank.stream), "weights: scatter from the ring");
  for (const int t : tensors) left_[t].fetch_sub(1, std::memory_order_relaxed);
  return going;
}

void WriteRun::fail(int tensor, std::string message) {
  {
    const std::lock_guard lock(mutex_);
    if (error_.empty()) {
      error_ = std::move(message);
      error_tensor_ = tensor;
    }
    stop_ = true;
  }
  readers_wake_.notify_all();
  ranks_wake_.notify_all();
}

}  // namespace refit::cuda
