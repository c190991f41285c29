#include "cuda/scatter/scatter_segment.h"

#include "cuda/device/check.h"

namespace refit::cuda {
namespace {

// The counter precedes the first array, so one copy transfers both.
constexpr size_t kCounterBytes = 16;
constexpr size_t kFirstBytes = (kCounterBytes + (kScatterCopies + 1) * sizeof(uint32_t) + 15) / 16 * 16;
constexpr size_t kListBytes = kFirstBytes + kScatterCopies * sizeof(ScatterCopy);

ScatterList list_at(uint8_t* base) {
  ScatterList list;
  list.first_tile = reinterpret_cast<uint32_t*>(base + kCounterBytes);
  list.copies = reinterpret_cast<ScatterCopy*>(base + kFirstBytes);
  list.capacity = kScatterCopies;
  return list;
}

}  // namespace

ScatterSegment::ScatterSegment() {
  check(cudaHostAlloc(reinterpret_cast<void**>(&host_), 2 * kListBytes, cudaHostAllocDefault),
        "cudaHostAlloc(scatter lists)");
  try {
    check(cudaMalloc(reinterpret_cast<void**>(&gpu_), 2 * kListBytes), "cudaMalloc(scatter list)");
    check(cudaEventCreateWithFlags(&done_, cudaEventDisableTiming), "cudaEventCreate");
  } catch (...) {
    cudaFree(gpu_);
    cudaFreeHost(host_);
    throw;
  }
}

ScatterSegment::~ScatterSegment() {
  // On a lost GPU these calls only fail.
  if (used_) cudaEventSynchronize(done_);
  cudaEventDestroy(done_);
  cudaFree(gpu_);
  cudaFreeHost(host_);
}

ScatterLists ScatterSegment::lists() {
  if (used_) check(cudaEventSynchronize(done_), "cudaEventSynchronize(scatter list)");
  return {list_at(host_), list_at(host_ + kListBytes)};
}

ScatterWork ScatterSegment::upload(const ScatterLists& lists, cudaStream_t stream) {
  return {upload(0, lists.threads, stream), upload(kListBytes, lists.bulk, stream)};
}

ScatterTiles ScatterSegment::upload(size_t offset, const ScatterList& list, cudaStream_t stream) {
  uint8_t* const host = host_ + offset;
  uint8_t* const gpu = gpu_ + offset;
  const auto send = [&](size_t at, size_t bytes) {
    check(cudaMemcpyAsync(gpu + at, host + at, bytes, cudaMemcpyHostToDevice, stream), "cudaMemcpyAsync(scatter list)");
  };
  *reinterpret_cast<uint32_t*>(host) = 0;
  // An empty list needs its counter, too: blocks read it once.
  send(0, kCounterBytes + (list.count > 0 ? list.count + 1 : 0) * sizeof(uint32_t));
  if (list.count > 0) send(kFirstBytes, list.count * sizeof(ScatterCopy));
  const ScatterList there = list_at(gpu);
  return {there.first_tile, there.copies, list.count, list.tiles, reinterpret_cast<uint32_t*>(gpu)};
}

void ScatterSegment::mark(cudaStream_t stream) {
  check(cudaEventRecord(done_, stream), "cudaEventRecord(scatter list)");
  used_ = true;
}

}  // namespace refit::cuda
