#include <algorithm>
#include <stdexcept>

#include "core/checksum.h"
#include "cuda/device/check.h"
#include "cuda/scatter/scatter_segment.h"
#include "cuda/scatter/scatter_tile.cuh"
#include "cuda/weights/checksum.h"

namespace refit::cuda {
namespace {

// A rectangle is planned like a copy whose target is the checkpoint tensor at address 0. The slots of its rows are then
// the groups of 8 elements that share a factor. The tag holds the number of the rectangle.
constexpr int kSumThreads = 512;
constexpr int kUnroll = 4;
constexpr uint32_t kTileBytes = 64 << 10;

static_assert(kChecksumGroup == 8 && kScatterCopies <= 65536);

// A sum mod 2^64 of products with constants, in two parts: low uses the constants' lower words, high their upper words.
// So an element costs two multiply-adds and no other addition; the compiler does not find that by itself.
struct Parts {
  uint64_t low = 0;
  uint32_t high = 0;

  template <uint64_t kFactor>
  __device__ __forceinline__ void add(uint32_t value) {
    asm("mad.wide.u32 %0, %1, %2, %0;" : "+l"(low) : "r"(value), "r"(static_cast<uint32_t>(kFactor)));
    asm("mad.lo.u32 %0, %1, %2, %0;" : "+r"(high) : "r"(value), "r"(static_cast<uint32_t>(kFactor >> 32)));
  }

  // Elements j and j + 1, in the lower and the upper half of the word: low * w(j) + high * w(j + 1), where
  // low = word - 2^16 high.
  template <int kFirst>
  __device__ __forceinline__ void add_word(uint32_t word) {
    add<checksum_weight(kFirst)>(word);
    add<checksum_weight(kFirst + 1) - (checksum_weight(kFirst) << 16)>(word >> 16);
  }

  __device__ __forceinline__ uint64_t total() const { return low + (static_cast<uint64_t>(high) << 32); }
};

__device__ __forceinline__ uint64_t sum_group(uint4 v, uint64_t group) {
  Parts parts;
  parts.add_word<0>(v.x);
  parts.add_word<2>(v.y);
  parts.add_word<4>(v.z);
  parts.add_word<6>(v.w);
  return parts.total() * checksum_factor(group);
}

// Whole groups, 16 bytes each.
__device__ __forceinline__ uint64_t sum_vectors(const ScatterJob& job, uint32_t thread) {
  const TileRange range = job.range;
  const auto src_row = static_cast<uint64_t>(job.copy.src_row);
  const uint64_t src = job.copy.src + range.row * src_row + static_cast<uint64_t>(range.slot) * 16;
  const uint64_t group_row = job.copy.dst_row / 16;
  const uint64_t group = job.copy.dst / 16 + range.row * group_row + range.slot;
  uint64_t sum = 0;
  if (range.rows == 1) {
#pragma unroll 1
    for (uint32_t i = thread; i < range.slots; i += kSumThreads * kUnroll) {
      uint4 v[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; u++) {
        const uint32_t at = i + u * kSumThreads;
        v[u] = at < range.slots ? load_vector(src + static_cast<uint64_t>(at) * 16) : uint4{0, 0, 0, 0};
      }
      // Zeros add nothing.
#pragma unroll
      for (int u = 0; u < kUnroll; u++) sum += sum_group(v[u], group + i + u * kSumThreads);
    }
    return sum;
  }
  Walk walk(thread, kSumThreads, range.slots);
#pragma unroll 1
  while (walk.row < range.rows) {
    uint4 v[kUnroll];
    uint64_t groups[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; u++) {
      v[u] = uint4{0, 0, 0, 0};
      groups[u] = group + walk.row * group_row + walk.slot;
      if (walk.row < range.rows) {
        v[u] = load_vector(src + walk.row * src_row + static_cast<uint64_t>(walk.slot) * 16);
      }
      walk.next();
    }
#pragma unroll
    for (int u = 0; u < kUnroll; u++) sum += sum_group(v[u], groups[u]);
  }
  return sum;
}

// Any alignment of elements to groups and of groups to memory.
__device__ __noinline__ uint64_t sum_slots(const ScatterJob& job, uint32_t thread) {
  const ScatterCopy& copy = job.copy;
  uint64_t sum = 0;
  for (Walk walk(thread, kSumThreads, job.range.slots); walk.row < job.range.rows; walk.next()) {
    const uint64_t row = job.range.row + walk.row;
    const uint64_t src = copy.src + row * static_cast<uint64_t>(copy.src_row);
    const uint64_t dst = copy.dst + row * copy.dst_row;
    const uint32_t slot = job.range.slot + walk.slot;
    const auto [first, from, to] = slot_range(dst, copy.cols, slot);
    const uint64_t group = dst / 16 + slot;
    if (to - from == 8) {
      const uint64_t address = src + static_cast<uint64_t>(first * copy.src_col);
      const uint4 v = copy.path == ScatterPath::kGather ? gather_slot<kElementType>(address, copy.src_col)
                                                        : load_slot<kElementType>(address, src, src + copy.cols * 2);
      sum += sum_group(v, group);
      continue;
    }
    if (to <= from) continue;
    uint64_t part = 0;
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const int64_t i = first + j;
      if (i >= from && i < to) part += load_u16(src + static_cast<uint64_t>(i * copy.src_col)) * checksum_weight(j);
    }
    sum += part * checksum_factor(group);
  }
  return sum;
}

// Sums the parts that the threads of a warp hold.
__device__ __forceinline__ void flush(unsigned long long* to, uint64_t sum) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (threadIdx.x % 32 == 0) atomicAdd(to, static_cast<unsigned long long>(sum));
}

__global__ void __launch_bounds__(kSumThreads, 2) checksum_kernel(ScatterTiles list, unsigned long long* sums) {
  __shared__ ScatterJob jobs[2];
  const uint32_t thread = threadIdx.x;
  TileFeed feed(list);
  if (thread < 32) {
    feed.ask();
    feed.next(jobs[0]);
  }
  // Carried over the tiles of a rectangle.
  uint64_t sum = 0;
  int rect = -1;
  for (uint32_t turn = 0;; turn ^= 1) {
    __syncthreads();
    const ScatterJob& job = jobs[turn];
    if (job.end) break;
    if (thread < 32) feed.next(jobs[turn ^ 1]);
    if (job.copy.tag != rect) {
      if (rect >= 0) flush(sums + rect, sum);
      rect = job.copy.tag;
      sum = 0;
    }
    sum += job.copy.path == ScatterPath::kVector ? sum_vectors(job, thread) : sum_slots(job, thread);
  }
  if (rect >= 0) flush(sums + rect, sum);
}

}  // namespace

struct Checksum::State {
  State() {
    int device = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
    check(cudaHostAlloc(reinterpret_cast<void**>(&host), kScatterCopies * sizeof(uint64_t), cudaHostAllocDefault),
          "cudaHostAlloc(checksums)");
    if (const cudaError_t failed = cudaMalloc(reinterpret_cast<void**>(&gpu), kScatterCopies * sizeof(uint64_t))) {
      cudaFreeHost(host);
      check(failed, "cudaMalloc(checksums)");
    }
  }
  ~State() {
    cudaFree(gpu);
    cudaFreeHost(host);
  }

  ScatterSegment segment;
  int sms = 0;
  uint64_t* host = nullptr;
  unsigned long long* gpu = nullptr;
};

Checksum::Checksum() : state_(std::make_unique<State>()) {}
Checksum::~Checksum() = default;

std::vector<uint64_t> Checksum::run(const std::vector<SumRect>& rects, cudaStream_t stream) {
  State& s = *state_;
  std::vector<uint64_t> out(rects.size());
  for (size_t from = 0; from < rects.size();) {
    ScatterLists lists = s.segment.lists();
    ScatterList& list = lists.threads;
    size_t to = from;
    for (; to < rects.size() && to - from < kScatterCopies; to++) {
      const SumRect& rect = rects[to];
      const Copy2d copy{rect.data,        reinterpret_cast<Element*>(rect.first * sizeof(Element)),
                        rect.rows,        rect.cols,
                        rect.pitch * 2,   sizeof(Element),
                        rect.tensor_cols, kElementType};
      const uint32_t begun = list.count;
      if (!plan_copy(copy, kTileBytes, false, lists)) break;
      for (uint32_t i = begun; i < list.count; i++) {
        list.copies[i].tag = static_cast<uint16_t>(to - from);
      }
    }
    if (to == from) throw std::length_error("checksum: a rectangle is too large for one launch");
    if (list.tiles > 0) {
      check(cudaMemsetAsync(s.gpu, 0, (to - from) * sizeof(uint64_t), stream), "cudaMemsetAsync(checksums)");
      const ScatterTiles tiles = s.segment.upload(lists, stream).threads;
      const auto blocks = std::min(tiles.tiles, static_cast<uint32_t>(2 * s.sms));
      checksum_kernel<<<blocks, kSumThreads, 0, stream>>>(tiles, s.gpu);
      check_launch("checksum");
      s.segment.mark(stream);
      check(cudaMemcpyAsync(s.host, s.gpu, (to - from) * sizeof(uint64_t), cudaMemcpyDeviceToHost, stream),
            "cudaMemcpyAsync(checksums)");
      check(cudaStreamSynchronize(stream), "checksum");
      std::copy_n(s.host, to - from, out.begin() + static_cast<int64_t>(from));
    }
    from = to;
  }
  return out;
}

}  // namespace refit::cuda
