// Assigns tokens to experts, orders their rows, and sums the results. Everything stays on the GPU, and every order is
// fixed: by token, expert and place, never by arrival.
#include <stdexcept>

#include "cuda/device/check.h"
#include "cuda/gemm/gemm_mma.cuh"
#include "cuda/moe/moe_kernels.h"

namespace refit::cuda {
namespace {

constexpr unsigned kAllLanes = 0xffffffff;
constexpr int kRouteWarps = 4;
constexpr int kSortThreads = 256;
constexpr int kCombineThreads = 128;

// One warp per token. PerLane: number of experts of a lane; lane l has experts l, l + 32, ...
template <int PerLane>
__global__ void __launch_bounds__(kRouteWarps * 32)
    route_kernel(const bf16* __restrict__ logits, int count, int experts, int k, bool norm, int32_t* __restrict__ ids,
                 float* __restrict__ weights, RouteRecord record) {
  const int lane = threadIdx.x % 32;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kRouteWarps + threadIdx.x / 32;
  if (token >= count) return;
  float p[PerLane];
  float most = -INFINITY;
#pragma unroll
  for (int i = 0; i < PerLane; i++) {
    const int e = i * 32 + lane;
    p[i] = e < experts ? __bfloat162float(logits[token * experts + e]) : -INFINITY;
    most = fmaxf(most, p[i]);
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, offset));
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < PerLane; i++) {
    if (i * 32 + lane >= experts) continue;
    p[i] = expf(p[i] - most);
    sum += p[i];
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(kAllLanes, sum, offset);
  // The keys of the choice: probabilities, below them NaN, below NaN the experts that are no candidates. One NaN among
  // the logits makes the sum NaN, and so every probability.
  constexpr float kNan = -1.0f, kGone = -2.0f;
#pragma unroll
  for (int i = 0; i < PerLane; i++) {
    const float share = p[i] / sum;
    p[i] = i * 32 + lane >= experts ? kGone : isnan(share) ? kNan : share;
  }
  int my_id = 0;  // lane j has the j-th best
  float my_weight = 0.0f, total = 0.0f;
  for (int j = 0; j < k; j++) {
    float best = kGone;
    int id = kMaxExperts;
#pragma unroll
    for (int i = 0; i < PerLane; i++) {
      if (p[i] > best) {
        best = p[i];
        id = i * 32 + lane;
      }
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      const float other = __shfl_xor_sync(kAllLanes, best, offset);
      const int other_id = __shfl_xor_sync(kAllLanes, id, offset);
      if (other > best || (other == best && other_id < id)) {
        best = other;
        id = other_id;
      }
    }
#pragma unroll
    for (int i = 0; i < PerLane; i++) {
      if (i * 32 + lane == id) p[i] = kGone;
    }
    const float weight = best == kNan ? NAN : best;
    total += weight;
    if (lane == j) {
      my_id = id;
      my_weight = weight;
    }
  }
  if (record.to != nullptr && lane < k) record.to[token * record.stride + lane] = static_cast<uint16_t>(my_id);
  if (norm) my_weight /= total;
  int rank = 0;  // position of my expert among the token's, by id
  for (int j = 0; j < k; j++) rank += __shfl_sync(kAllLanes, my_id, j) < my_id;
  if (lane < k) {
    ids[token * k + rank] = my_id;
    weights[token * k + rank] = rounded(my_weight);
  }
}

template <int PerLane>
void route(const MoeShape& s, const MoeScratch& scratch, int64_t count, cudaStream_t stream, RouteRecord record) {
  const auto blocks = static_cast<unsigned>((count + kRouteWarps - 1) / kRouteWarps);
  route_kernel<PerLane><<<blocks, kRouteWarps * 32, 0, stream>>>(scratch.logits, static_cast<int>(count), s.experts,
                                                                 s.per_token, s.norm_topk_prob, scratch.ids,
                                                                 scratch.weights, record);
  check_launch("launch of the expert choice");
}

// Sums both values over the block, in every thread. `shared`: memory of the kernel that is not in use.
__device__ __forceinline__ int2 block_sum(int2 v, int2* shared) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    v.x += __shfl_xor_sync(kAllLanes, v.x, offset);
    v.y += __shfl_xor_sync(kAllLanes, v.y, offset);
  }
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = v;
  __syncthreads();
  int2 sum = make_int2(0, 0);
  for (int i = 0; i < kSortThreads / 32; i++) {
    sum.x += shared[i].x;
    sum.y += shared[i].y;
  }
  return sum;
}

// One block per expert. Each block counts all experts, so blocks do not wait for each other.
__global__ void __launch_bounds__(kSortThreads)
    sort_kernel(const int32_t* __restrict__ ids, int pairs, int experts, int k, int tile_rows,
                int32_t* __restrict__ slots, int32_t* __restrict__ tokens, RowTile* __restrict__ tiles,
                int32_t* __restrict__ tile_count) {
  __shared__ int rows[kMaxExperts];
  __shared__ int2 sums[kSortThreads / 32];
  __shared__ int warp_rows[2][kSortThreads / 32];
  const int expert = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int e = threadIdx.x; e < experts; e += kSortThreads) rows[e] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < pairs; i += kSortThreads) atomicAdd(&rows[ids[i]], 1);
  __syncthreads();
  const int mine = rows[expert], my_tiles = (mine + tile_rows - 1) / tile_rows;
  int2 before = make_int2(0, 0);  // rows and tiles of the experts before this one
  for (int e = threadIdx.x; e < expert; e += kSortThreads) {
    before.x += rows[e];
    before.y += (rows[e] + tile_rows - 1) / tile_rows;
  }
  before = block_sum(before, sums);
  if (expert == experts - 1 && threadIdx.x == 0) *tile_count = before.y + my_tiles;
  for (int i = threadIdx.x; i < my_tiles; i += kSortThreads) {
    tiles[before.y + i] = {expert, before.x + i * tile_rows, min(tile_rows, mine - i * tile_rows)};
  }
  if (mine == 0) return;
  int next = before.x;  // slot of the expert's next token
  for (int begin = 0, turn = 0; begin < pairs; begin += kSortThreads, turn ^= 1) {
    const int i = begin + threadIdx.x;
    const bool here = i < pairs && ids[i] == expert;
    const unsigned lanes = __ballot_sync(kAllLanes, here);
    if (lane == 0) warp_rows[turn][warp] = __popc(lanes);
    // One barrier per turn is enough with two buffers: a thread that writes this buffer again has passed the next
    // turn's barrier, which all readers of this turn reached after reading.
    __syncthreads();
    int slot = next + __popc(lanes & ((1u << lane) - 1));
    for (int w = 0; w < kSortThreads / 32; w++) {
      if (w < warp) slot += warp_rows[turn][w];
      next += warp_rows[turn][w];
    }
    if (here) {
      slots[i] = slot;
      tokens[slot] = i / k;
    }
  }
}

template <int Width, class T>
struct alignas(Width * sizeof(T)) Pack {
  T v[Width];
};

// Blocks (columns, token). Value: bf16, or float for partial sums. Width: columns of one thread.
template <class Value, int Width>
__global__ void __launch_bounds__(kCombineThreads)
    combine_kernel(const Value* __restrict__ out, const int32_t* __restrict__ slots, const float* __restrict__ weights,
                   int k, int64_t hidden, bf16* __restrict__ y) {
  constexpr bool kPartial = sizeof(Value) == 4;
  const int64_t token = blockIdx.y;
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * kCombineThreads + threadIdx.x) * Width;
  if (column >= hidden) return;
  float sum[Width] = {};
#pragma unroll 4
  for (int j = 0; j < k; j++) {
    const float weight = weights[token * k + j];
    const auto from = *reinterpret_cast<const Pack<Width, Value>*>(out + slots[token * k + j] * hidden + column);
#pragma unroll
    for (int i = 0; i < Width; i++) {
      if constexpr (kPartial) {
        sum[i] += weight * from.v[i];
      } else {
        sum[i] = rounded(sum[i] + rounded(__bfloat162float(from.v[i]) * weight));
      }
    }
  }
  Pack<Width, bf16> to;
#pragma unroll
  for (int i = 0; i < Width; i++) to.v[i] = __float2bfloat16_rn(sum[i]);
  *reinterpret_cast<Pack<Width, bf16>*>(y + token * hidden + column) = to;
}

template <class Value, int Width>
void combine(const MoeShape& s, const MoeScratch& scratch, bf16* y, int64_t count, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((s.hidden + kCombineThreads * Width - 1) / (kCombineThreads * Width));
  combine_kernel<Value, Width><<<dim3(blocks, static_cast<unsigned>(count)), kCombineThreads, 0, stream>>>(
      static_cast<const Value*>(scratch.out), scratch.slots, scratch.weights, s.per_token, s.hidden, y);
  check_launch("launch of the experts' sum");
}

template <class Kernel>
void prepare(Kernel kernel) {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, kernel), "loading a kernel of the experts");
}

}  // namespace

void choose_experts(const MoeShape& s, const MoeScratch& scratch, int64_t count, cudaStream_t stream,
                    RouteRecord record) {
  if (s.experts <= 32) return route<1>(s, scratch, count, stream, record);
  if (s.experts <= 64) return route<2>(s, scratch, count, stream, record);
  if (s.experts <= 128) return route<4>(s, scratch, count, stream, record);
  if (s.experts <= 256) return route<8>(s, scratch, count, stream, record);
  return route<kMaxExperts / 32>(s, scratch, count, stream, record);
}

void sort_by_expert(const MoeShape& s, const MoeScratch& scratch, int64_t count, int tile_rows, cudaStream_t stream) {
  sort_kernel<<<static_cast<unsigned>(s.experts), kSortThreads, 0, stream>>>(
      scratch.ids, static_cast<int>(count * s.per_token), s.experts, s.per_token, tile_rows, scratch.slots,
      scratch.tokens, scratch.tiles, scratch.tile_count);
  check_launch("launch of the sort by expert");
}

void combine_experts(const MoeShape& s, const MoeScratch& scratch, bf16* y, int64_t count, bool partial,
                     cudaStream_t stream) {
  const bool wide = s.hidden % 8 == 0 && reinterpret_cast<uintptr_t>(y) % 16 == 0;
  if (partial) {
    wide ? combine<float, 8>(s, scratch, y, count, stream) : combine<float, 1>(s, scratch, y, count, stream);
  } else {
    wide ? combine<bf16, 8>(s, scratch, y, count, stream) : combine<bf16, 1>(s, scratch, y, count, stream);
  }
}

void prepare_moe_route() {
  prepare(route_kernel<1>);
  prepare(route_kernel<2>);
  prepare(route_kernel<4>);
  prepare(route_kernel<8>);
  prepare(route_kernel<kMaxExperts / 32>);
  prepare(sort_kernel);
  prepare(combine_kernel<bf16, 1>);
  prepare(combine_kernel<bf16, 8>);
  prepare(combine_kernel<float, 1>);
  prepare(combine_kernel<float, 8>);
}

}  // namespace refit::cuda
