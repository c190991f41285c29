#include "cuda/scatter/scatter.h"

#include <array>
#include <stdexcept>

#include "cuda/device/check.h"
#include "cuda/scatter/scatter_kernel.h"
#include "cuda/scatter/scatter_plan.h"
#include "cuda/scatter/scatter_runs.h"
#include "cuda/scatter/scatter_segment.h"

namespace refit::cuda {
namespace {

// False for memory of a peer.
bool lies_on(int device, const void* memory) {
  cudaPointerAttributes attributes{};
  if (cudaPointerGetAttributes(&attributes, memory) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  return attributes.type == cudaMemoryTypeDevice && attributes.device == device;
}

}  // namespace

struct Scatter::State {
  State(uint32_t tile_bytes, bool wanted, uint64_t long_run) : tile_bytes(tile_bytes), long_run(long_run) {
    int major = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
    bulk = wanted && major >= 9;
  }

  const uint32_t tile_bytes;
  const uint64_t long_run;
  int device = 0;
  bool bulk;
  // Lists that may be pending before the host waits for the oldest.
  std::array<ScatterSegment, 4> segments;
  size_t next = 0;
};

Scatter::Scatter(uint32_t tile_bytes, bool bulk, uint64_t long_run)
    : state_(std::make_unique<State>(tile_bytes, bulk, long_run)) {}

Scatter::~Scatter() = default;

void Scatter::run(const std::vector<Copy2d>& all, cudaStream_t stream, bool from_host) {
  auto [runs, copies] = split_runs(all, from_host ? UINT64_MAX : state_->long_run);
  for (const ByteRun& run : runs) {
    if (!lies_on(state_->device, run.src)) {
      copies.push_back(copy_of(run));
      continue;
    }
    check(cudaMemcpyAsync(run.dst, run.src, run.bytes, cudaMemcpyDeviceToDevice, stream), "cudaMemcpyAsync(scatter)");
  }
  for (size_t from = 0; from < copies.size();) {
    ScatterSegment& segment = state_->segments[state_->next];
    state_->next = (state_->next + 1) % state_->segments.size();
    ScatterLists lists = segment.lists();
    const size_t planned = plan_scatter(copies, from, state_->tile_bytes, state_->bulk && !from_host, lists);
    if (planned == from) throw std::length_error("scatter: a copy is too large for one launch");
    from = planned;
    if (lists.threads.count == 0 && lists.bulk.count == 0) continue;
    launch_scatter(segment.upload(lists, stream), stream);
    segment.mark(stream);
  }
}

}  // namespace refit::cuda
