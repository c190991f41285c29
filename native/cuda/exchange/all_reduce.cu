#include <algorithm>
#include <type_traits>

#include "cuda/device/check.h"
#include "cuda/exchange/all_reduce.h"

namespace refit::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kSumBlocks = 1024;  // twice what a large GPU runs at a time

// Flags of a rank: [phase][block][peer], the epoch that `peer` has reached. They only rise, so they are never reset,
// and a peer that is one call ahead does no harm.
constexpr int kPhases = 2;
static_assert(sizeof(uint64_t) * kPhases * kCollectiveBlocks * kMaxRanks <= kSignalBytes);

__device__ int flag(int phase, int peer) {
  return (phase * kCollectiveBlocks + static_cast<int>(blockIdx.x)) * kMaxRanks + peer;
}

// System scope, because the other side is another GPU.
__device__ void store_release(uint64_t* p, uint64_t v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ uint64_t load_acquire(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

// Barrier of this block with the same block of all peers. What they wrote before, in this kernel or in earlier ones of
// their streams, is visible to this block afterwards. One thread's release and acquire serve the whole block:
// __syncthreads orders the other threads' accesses before the release and after the acquire.
__device__ void meet(const PeerGroup& group, int phase, const Epoch& number) {
  __syncthreads();
  const uint64_t epoch = number.call + (number.base != nullptr ? *number.base : 0);
  const int peer = static_cast<int>(threadIdx.x);
  if (peer < group.ranks) {
    store_release(group.signals[peer] + flag(phase, group.rank), epoch);
    const uint64_t* own = group.signals[group.rank] + flag(phase, peer);
    while (load_acquire(own) < epoch) {
    }
  }
  __syncthreads();
}

__device__ float2 widen(uint32_t pair) { return {half_to_float<0>(pair), half_to_float<1>(pair)}; }

__device__ uint32_t narrow(float2 f) {
  const Element2 pair = to_elements(f.x, f.y);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Sum of vector i of all ranks, in rank order.
template <int kRanks>
__device__ uint4 sum(const Element* const* buffers, int64_t i) {
  uint4 parts[kRanks];
#pragma unroll
  for (int r = 0; r < kRanks; ++r) parts[r] = reinterpret_cast<const uint4*>(buffers[r])[i];
  float2 acc[4];
#pragma unroll
  for (int r = 0; r < kRanks; ++r) {
    const uint32_t words[4] = {parts[r].x, parts[r].y, parts[r].z, parts[r].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 f = widen(words[j]);
      acc[j] = r == 0 ? f : make_float2(acc[j].x + f.x, acc[j].y + f.y);
    }
  }
  return {narrow(acc[0]), narrow(acc[1]), narrow(acc[2]), narrow(acc[3])};
}

// A vector has 8 elements.
template <int kRanks>
__global__ void __launch_bounds__(kThreads)
    one_shot_kernel(PeerGroup group, int side, uint4* out, int64_t vectors, Epoch epoch) {
  meet(group, 0, epoch);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < vectors; i += stride)
    out[i] = sum<kRanks>(group.buffers[side], i);
}

// Rank r sums vectors [r * share, (r + 1) * share) into its own buffer: no other rank reads those before they are
// summed. A block gathers what the same block of each peer has summed, so only blocks with the same index synchronize.
template <int kRanks>
__global__ void __launch_bounds__(kThreads)
    two_shot_kernel(PeerGroup group, int side, uint4* out, int64_t vectors, Epoch epoch) {
  const int64_t share = (vectors + kRanks - 1) / kRanks;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  meet(group, 0, epoch);
  uint4* own = reinterpret_cast<uint4*>(group.buffers[side][group.rank]);
  for (int64_t i = first; i < share; i += stride) {
    const int64_t at = group.rank * share + i;
    if (at < vectors) own[at] = sum<kRanks>(group.buffers[side], at);
  }
  meet(group, 1, epoch);
  for (int64_t i = first; i < share; i += stride) {
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      const int64_t at = r * share + i;
      if (at < vectors) out[at] = reinterpret_cast<const uint4*>(group.buffers[side][r])[at];
    }
  }
}

// A row has `vectors` vectors of each rank.
template <int kRanks>
__global__ void __launch_bounds__(kThreads)
    gather_kernel(PeerGroup group, int side, uint4* out, int64_t rows, int64_t vectors, Epoch epoch) {
  meet(group, 0, epoch);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < rows * vectors; i += stride) {
    const int64_t row = i / vectors, column = i - row * vectors;
    uint4 parts[kRanks];
#pragma unroll
    for (int r = 0; r < kRanks; ++r) parts[r] = reinterpret_cast<const uint4*>(group.buffers[side][r])[i];
#pragma unroll
    for (int r = 0; r < kRanks; ++r) out[(row * kRanks + r) * vectors + column] = parts[r];
  }
}

template <int kRanks>
__global__ void __launch_bounds__(kThreads) sum_kernel(SumParts parts, uint4* out, int64_t vectors) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < vectors; i += stride)
    out[i] = sum<kRanks>(parts.buffers, i);
}

__global__ void barrier_kernel(PeerGroup group, Epoch epoch) { meet(group, 0, epoch); }

int blocks_for(const PeerGroup& group, int64_t vectors) {
  const int most = std::clamp(group.blocks, 1, kCollectiveBlocks);
  return static_cast<int>(std::min<int64_t>(most, (vectors + kThreads - 1) / kThreads));
}

template <int kRanks>
void launch(bool two_shot, const PeerGroup& group, int side, Element* out, int64_t vectors, Epoch epoch,
            cudaStream_t stream) {
  const int64_t work = two_shot ? (vectors + kRanks - 1) / kRanks : vectors;
  const int blocks = blocks_for(group, work);
  uint4* to = reinterpret_cast<uint4*>(out);
  if (two_shot) {
    two_shot_kernel<kRanks><<<blocks, kThreads, 0, stream>>>(group, side, to, vectors, epoch);
  } else {
    one_shot_kernel<kRanks><<<blocks, kThreads, 0, stream>>>(group, side, to, vectors, epoch);
  }
  check_launch("all_reduce");
}

// Calls fn(std::integral_constant<int, ranks>), so that kernels know the number of ranks.
template <class Fn>
void for_ranks(int ranks, Fn&& fn) {
  switch (ranks) {
    case 1:
      return fn(std::integral_constant<int, 1>());
    case 2:
      return fn(std::integral_constant<int, 2>());
    case 3:
      return fn(std::integral_constant<int, 3>());
    case 4:
      return fn(std::integral_constant<int, 4>());
    case 5:
      return fn(std::integral_constant<int, 5>());
    case 6:
      return fn(std::integral_constant<int, 6>());
    case 7:
      return fn(std::integral_constant<int, 7>());
    default:
      return fn(std::integral_constant<int, 8>());
  }
}

void run(bool two_shot, const PeerGroup& group, int side, Element* out, int64_t count, Epoch epoch,
         cudaStream_t stream) {
  if (count <= 0) return;
  const int64_t vectors = (count + 7) / 8;
  if (group.ranks == 1) {
    check(cudaMemcpyAsync(out, group.buffers[side][0], vectors * 16, cudaMemcpyDeviceToDevice, stream), "all_reduce");
    return;
  }
  for_ranks(group.ranks, [&](auto ranks) { launch<ranks>(two_shot, group, side, out, vectors, epoch, stream); });
}

}  // namespace

void all_reduce(const PeerGroup& group, int side, Element* out, int64_t count, Epoch epoch, cudaStream_t stream) {
  // With two ranks both ways read the same bytes from the peer.
  const bool two_shot = group.ranks > 2 && count * static_cast<int64_t>(sizeof(Element)) > kOneShotBytes;
  run(two_shot, group, side, out, count, epoch, stream);
}

void all_reduce_one_shot(const PeerGroup& group, int side, Element* out, int64_t count, Epoch epoch,
                         cudaStream_t stream) {
  run(false, group, side, out, count, epoch, stream);
}

void all_reduce_two_shot(const PeerGroup& group, int side, Element* out, int64_t count, Epoch epoch,
                         cudaStream_t stream) {
  run(true, group, side, out, count, epoch, stream);
}

void all_gather(const PeerGroup& group, int side, Element* out, int64_t rows, int64_t columns, Epoch epoch,
                cudaStream_t stream) {
  const int64_t vectors = columns / 8;
  if (rows <= 0) return;
  const int blocks = blocks_for(group, rows * vectors);
  uint4* to = reinterpret_cast<uint4*>(out);
  for_ranks(group.ranks, [&](auto ranks) {
    gather_kernel<ranks><<<blocks, kThreads, 0, stream>>>(group, side, to, rows, vectors, epoch);
  });
  check_launch("all_gather");
}

void sum_parts(const SumParts& parts, int ranks, Element* out, int64_t count, cudaStream_t stream) {
  if (count <= 0) return;
  const int64_t vectors = (count + 7) / 8;
  const auto blocks = static_cast<int>(std::min<int64_t>(kSumBlocks, (vectors + kThreads - 1) / kThreads));
  uint4* to = reinterpret_cast<uint4*>(out);
  for_ranks(ranks, [&](auto n) { sum_kernel<n><<<blocks, kThreads, 0, stream>>>(parts, to, vectors); });
  check_launch("sum_parts");
}

void barrier(const PeerGroup& group, Epoch epoch, cudaStream_t stream) {
  if (group.ranks == 1) return;
  barrier_kernel<<<1, 32, 0, stream>>>(group, epoch);
  check_launch("barrier");
}

}  // namespace refit::cuda
