#include "cuda/scatter/scatter.h"

#include <array>
#include <climits>
#include <stdexcept>

#include "cuda/device/check.h"
#include "cuda/scatter/scatter_kernel.h"
#include "cuda/scatter/scatter_plan.h"
#include "cuda/scatter/scatter_runs.h"
#include "cuda/scatter/scatter_segment.h"

namespace refit::cuda {
namespace {

// Blocks that read from peers while the others copy within the GPU. Estimated, not tuned: 450 GB/s of NVLink for 2 us
// are about 40 tiles in flight, and a block has two.
constexpr unsigned kPeerBlocks = 48;
constexpr unsigned kAllBlocks = UINT_MAX;

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

  ~State() {
    if (peer_stream == nullptr) return;
    cudaEventDestroy(begun);
    cudaEventDestroy(done);
    cudaStreamDestroy(peer_stream);
  }

  void enqueue(const std::vector<Copy2d>& copies, cudaStream_t stream, bool may_bulk, unsigned most_blocks);
  // The copies from peers run beside what is enqueued on `stream` until they are joined.
  void fork_peers(const std::vector<Copy2d>& copies, cudaStream_t stream);
  void join_peers(cudaStream_t stream);

  const uint32_t tile_bytes;
  const uint64_t long_run;
  int device = 0;
  bool bulk;
  // Lists that may be pending before the host waits for the oldest.
  std::array<ScatterSegment, 4> segments;
  size_t next = 0;
  cudaStream_t peer_stream = nullptr;
  cudaEvent_t begun = nullptr, done = nullptr;
};

void Scatter::State::enqueue(const std::vector<Copy2d>& copies, cudaStream_t stream, bool may_bulk,
                             unsigned most_blocks) {
  for (size_t from = 0; from < copies.size();) {
    ScatterSegment& segment = segments[next];
    next = (next + 1) % segments.size();
    ScatterLists lists = segment.lists();
    const size_t planned = plan_scatter(copies, from, tile_bytes, bulk && may_bulk, lists);
    if (planned == from) throw std::length_error("scatter: a copy is too large for one launch");
    from = planned;
    if (lists.threads.count == 0 && lists.bulk.count == 0) continue;
    launch_scatter(segment.upload(lists, stream), stream, most_blocks);
    segment.mark(stream);
  }
}

void Scatter::State::fork_peers(const std::vector<Copy2d>& copies, cudaStream_t stream) {
  if (peer_stream == nullptr) {
    // The stream last: it says that all are there.
    check(cudaEventCreateWithFlags(&begun, cudaEventDisableTiming), "cudaEventCreate");
    check(cudaEventCreateWithFlags(&done, cudaEventDisableTiming), "cudaEventCreate");
    check(cudaStreamCreateWithFlags(&peer_stream, cudaStreamNonBlocking), "cudaStreamCreate(scatter)");
  }
  check(cudaEventRecord(begun, stream), "cudaEventRecord(scatter)");
  check(cudaStreamWaitEvent(peer_stream, begun), "cudaStreamWaitEvent(scatter)");
  enqueue(copies, peer_stream, true, kPeerBlocks);
}

void Scatter::State::join_peers(cudaStream_t stream) {
  check(cudaEventRecord(done, peer_stream), "cudaEventRecord(scatter)");
  check(cudaStreamWaitEvent(stream, done), "cudaStreamWaitEvent(scatter)");
}

Scatter::Scatter(uint32_t tile_bytes, bool bulk, uint64_t long_run)
    : state_(std::make_unique<State>(tile_bytes, bulk, long_run)) {}

Scatter::~Scatter() = default;

void Scatter::run(const std::vector<Copy2d>& all, cudaStream_t stream, bool from_host) {
  auto [runs, rest] = split_runs(all, from_host ? UINT64_MAX : state_->long_run);
  if (from_host) return state_->enqueue(rest, stream, false, kAllBlocks);
  std::vector<Copy2d> own, peers;
  bool is_own = false;
  for (size_t i = 0; i < rest.size(); i++) {
    if (i == 0 || rest[i].memory != rest[i - 1].memory) is_own = lies_on(state_->device, rest[i].src);
    (is_own ? own : peers).push_back(rest[i]);
  }
  std::erase_if(runs, [&](const ByteRun& run) {
    const bool is_peer = !lies_on(state_->device, run.src);
    if (is_peer) peers.push_back(copy_of(run));
    return is_peer;
  });
  if (own.empty() && runs.empty()) return state_->enqueue(peers, stream, true, kAllBlocks);
  try {
    if (!peers.empty()) state_->fork_peers(peers, stream);
    for (const ByteRun& run : runs) {
      check(cudaMemcpyAsync(run.dst, run.src, run.bytes, cudaMemcpyDeviceToDevice, stream), "cudaMemcpyAsync(scatter)");
    }
    state_->enqueue(own, stream, true, kAllBlocks);
    if (!peers.empty()) state_->join_peers(stream);
  } catch (...) {
    // The caller waits for its own stream before sources are closed, and does not know this one.
    if (state_->peer_stream != nullptr) cudaStreamSynchronize(state_->peer_stream);
    throw;
  }
}

}  // namespace refit::cuda
