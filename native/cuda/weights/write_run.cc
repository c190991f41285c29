#include "cuda/weights/write_run.h"

#include <algorithm>
#include <exception>
#include <future>
#include <new>
#include <utility>

#include "core/device.h"
#include "core/fault.h"
#include "cuda/device/check.h"

namespace refit::cuda {
namespace {

// Pending batches before a rank waits for the oldest: the GPU always has the next one in its queue.
constexpr size_t kUnderWay = 4;

}  // namespace

RankWriter::RankWriter(size_t slots) : copied(slots), scattered(slots) {
  for (auto* events : {&copied, &scattered}) {
    for (cudaEvent_t& event : *events) {
      check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    }
  }
}

RankWriter::~RankWriter() {
  for (auto* events : {&copied, &scattered}) {
    for (cudaEvent_t event : *events) cudaEventDestroy(event);
  }
}

WriteRun::WriteRun(const GpuParams& params, const WriteJob& job, PinnedRing& ring,
                   std::vector<std::unique_ptr<RankWriter>>& writers, std::vector<Pace>& paces, ipc::Mappings& mappings)
    : params_(params),
      job_(job),
      ring_(ring),
      writers_(writers),
      paces_(paces),
      direct_(writers.size()),
      retired_(writers.size()) {
  left_ = std::make_unique<std::atomic<int64_t>[]>(job.tensors.size());
  dirty_ = std::make_unique<std::atomic<bool>[]>(job.tensors.size());
  plan_direct();
  if (!batches_.batches.empty() && REFIT_FAULT(kAlloc)) throw std::bad_alloc();
  chunks_left_ = std::make_unique<std::atomic<int64_t>[]>(batches_.batches.size());
  for (size_t b = 0; b < batches_.batches.size(); b++) {
    chunks_left_[b] = static_cast<int64_t>(batches_.batches[b].chunks);
  }
  for (const Chunk& chunk : batches_.plan.chunks) left_[chunk.tensor] += static_cast<int64_t>(chunk.rects);
  session_ = std::make_unique<ipc::Session>(
      mappings, job, [this](int tensor, std::string message) { fail(tensor, std::move(message)); });
}

// Splits the sources into those that GPUs read themselves and those that are read into the ring.
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
    if (source.segment < 0)
      direct_[rect.rank].push_back({rect.tensor, rect_copy(tensor, rect, params_.shapes[rect.param],
                                                           source.of(rect.rank), params_.at(rect.rank, rect.param))});
    left_[rect.tensor]++;
    needed[rect.tensor] += static_cast<uint64_t>(rect.rows * rect.cols) * size_of(tensor.dtype);
  }
  // Bytes that several ranks need are read once, so they count once.
  for (size_t t = 0; t < needed.size(); t++) {
    const Tensor& tensor = job_.tensors[t];
    const uint64_t bytes =
        std::min(needed[t], static_cast<uint64_t>(tensor.rows * tensor.cols) * size_of(tensor.dtype));
    if (job_.sources[tensor.source].segment < 0) {
      bytes_ += bytes;
    } else {
      segment_bytes_.resize(needed.size());
      segment_bytes_[t] = bytes;
    }
  }
}

// For each source, whether all GPUs can read it. Pinned memory has one address for the host and all GPUs. Checks both
// ends of a source on every GPU.
std::vector<uint8_t> WriteRun::find_near() {
  std::vector<uint8_t> near(job_.sources.size());
  bool ask = false;
  for (size_t s = 0; s < near.size(); s++) {
    const Source& source = job_.sources[s];
    near[s] = source.fd < 0 && (source.on_gpu() || (source.data != nullptr && source.bytes > 0));
    ask = ask || (near[s] != 0 && !source.on_gpu());
  }
  if (!ask) return near;
  std::mutex mutex;
  on_all(*params_.ranks, [&](Rank&) {
    for (size_t s = 0; s < near.size(); s++) {
      const Source& source = job_.sources[s];
      if (source.fd >= 0 || source.on_gpu() || source.bytes == 0) continue;
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
  try {
    for (auto& rank : *params_.ranks) futures.push_back(rank->run([this, &rank = *rank] { drain_whole(rank); }));
    session_->open();
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
  // All tasks must have ended before anything that they refer to is destroyed.
  std::exception_ptr lost;
  for (auto& future : futures) {
    try {
      wait(future);
    } catch (const DeviceLost&) {
      lost = std::current_exception();
    } catch (const std::exception&) {
      // outcome() reports this.
    }
  }
  close_segments(lost != nullptr);
  if (lost) std::rethrow_exception(lost);
}

// Runs on a rank's thread, for its deadline.
void WriteRun::close_segments(bool lost) {
  if (session_->empty()) return;
  if (lost) return session_->abandon();
  Rank& rank = *params_.ranks->front();
  auto done = rank.run([&] {
    rank.doing("weights: close shared memory");
    session_->close(!error_.empty());
  });
  try {
    wait(done);
  } catch (const DeviceLost&) {
    throw;
  } catch (const std::exception& e) {
    fail(-1, e.what());
  }
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
  for (size_t t = 0; t < segment_bytes_.size(); t++) {
    if (left_[t] == 0) out.bytes += segment_bytes_[t];
  }
  out.segments_opened = session_->opened();
  out.segments_closed = session_->closed();
  out.warning = session_->warning();
  out.error = error_;
  out.error_tensor = error_tensor_;
  return out;
}

// --- the ranks' threads

void WriteRun::drain_whole(Rank& rank) {
  try {
    drain(rank);
  } catch (const std::exception& e) {
    {
      const std::lock_guard lock(mutex_);
      broken_ = true;
    }
    fail(-1, rank.label() + ": " + e.what());
    // Pending copies must not read memory that is closed and freed next.
    cudaStreamSynchronize(rank.copy);
    cudaStreamSynchronize(rank.stream);
    throw;
  }
}

void WriteRun::drain(Rank& rank) {
  size_t given = 0;
  size_t& retired = retired_[static_cast<size_t>(rank.index)];  // only this thread writes it, under the mutex
  // Segments first: if handles are refused, nothing else may have been written.
  bool going = read_segments(rank) && run_direct(rank);
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

// Scatters segments of other processes as they open. Like all functions below, returns false if the write must end.
bool WriteRun::read_segments(Rank& rank) {
  if (session_->empty()) return true;
  rank.doing("weights: open shared memory");
  session_->prepare(rank.index);
  rank.waiting("weights: waiting for the sender's work");
  if (!session_->begin()) return false;
  bool going = true;
  size_t first = 0, last = 0;
  std::vector<Copy2d> copies;
  std::vector<int> tensors;
  while (going) {
    rank.doing("weights: open shared memory");
    if (!session_->next(rank.index, first, last)) break;
    copies.clear();
    tensors.clear();
    for (size_t i = first; i < last && going; i++) {
      const ipc::Session::Opened& segment = session_->segments(rank.index)[i];
      const auto* const data = reinterpret_cast<const uint8_t*>(segment.mapping.base);
      for (const size_t index : segment.plan.rects) {
        const Rect& rect = job_.rects[index];
        going = may_copy(rect.tensor);
        if (!going) break;
        copies.push_back(rect_copy(job_.tensors[rect.tensor], rect, params_.shapes[rect.param], data,
                                   params_.at(rect.rank, rect.param)));
        copies.back().memory = static_cast<int>(i);
        tensors.push_back(rect.tensor);
      }
    }
    going = scatter(rank, copies, tensors, false) && going;
  }
  return going && !stop_;
}

// Scatters sources that GPUs read where they lie.
bool WriteRun::run_direct(Rank& rank) {
  const std::vector<Direct>& all = direct_[static_cast<size_t>(rank.index)];
  bool going = true;
  std::vector<Copy2d> copies;
  copies.reserve(all.size());
  std::vector<int> tensors;
  tensors.reserve(all.size());
  bool from_host = false;
  for (const Direct& direct : all) {
    going = may_copy(direct.tensor);
    if (!going) break;
    copies.push_back(direct.copy);
    tensors.push_back(direct.tensor);
    from_host = from_host || !job_.sources[job_.tensors[direct.tensor].source].on_gpu();
  }
  return scatter(rank, copies, tensors, from_host) && going;
}

bool WriteRun::may_copy(int tensor) {
  if (!may_go_on(tensor)) return false;
  if (!REFIT_FAULT(kCopy)) return true;
  fail(tensor, "injected fault: copy");
  return false;
}

bool WriteRun::may_go_on(int tensor) {
  if (job_.cancel == nullptr || !job_.cancel->load(std::memory_order_relaxed)) return true;
  fail(tensor, "the write was cancelled");
  return false;
}

// copies[i] belongs to tensors[i]. After a cancel or a failure the rest is not written, and no tensor counts as
// written.
bool WriteRun::scatter(Rank& rank, const std::vector<Copy2d>& copies, const std::vector<int>& tensors, bool from_host) {
  for (const int t : tensors) dirty_[t].store(true, std::memory_order_relaxed);
  Scatter& scatter = writers_[static_cast<size_t>(rank.index)]->scatter;
  const bool going = paced(copies, paces_[static_cast<size_t>(rank.index)], [&](const std::vector<Copy2d>& slice) {
    if (stop_.load(std::memory_order_relaxed) || !may_go_on(tensors.empty() ? -1 : tensors.front())) return false;
    rank.doing("weights: scatter");
    scatter.run(slice, rank.stream, from_host);
    return true;
  });
  if (!going) return false;
  for (const int t : tensors) left_[t].fetch_sub(1, std::memory_order_relaxed);
  return true;
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
  if (session_ != nullptr) session_->stop();
  readers_wake_.notify_all();
  ranks_wake_.notify_all();
}

}  // namespace refit::cuda
