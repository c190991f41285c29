// Assigns tokens to experts, orders their rows, and sums the results. Everything stays on the GPU, and every order is
// fixed: by token, expert and place, never by arrival.
#include <stdexcept>

#include "cuda/device/early_launch.cuh"
#include "cuda/device/load_kernels.h"
#include "cuda/gemm/gemm_mma.cuh"
#include "cuda/moe/moe_kernels.h"

namespace refit::cuda {
namespace {

constexpr unsigned kAllLanes = 0xffffffff;
constexpr int kRouteWarps = 4;
constexpr int kSortThreads = 512;
constexpr int kCombineThreads = 128;

// One warp per token. PerLane: number of experts of a lane; lane l has experts l, l + 32, ...
template <int PerLane>
__global__ void __launch_bounds__(kRouteWarps * 32)
    route_kernel(const Element* logits, int count, int experts, int k, bool norm, const int32_t* kv_slots,
                 int32_t* __restrict__ ids, float* __restrict__ weights, int32_t* __restrict__ slots,
                 RouteRecord record) {
  let_next_kernel_begin();
  wait_for_kernel_before();
  const int lane = threadIdx.x % 32;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kRouteWarps + threadIdx.x / 32;
  if (token >= count) return;
  if (kv_slots != nullptr && kv_slots[token] < 0) {
    if (lane < k) ids[token * k + lane] = -1, weights[token * k + lane] = 0.0f, slots[token * k + lane] = 0;
    return;
  }
  float p[PerLane];
  float most = -INFINITY;
#pragma unroll
  for (int i = 0; i < PerLane; i++) {
    const int e = i * 32 + lane;
    p[i] = e < experts ? to_float(logits[token * experts + e]) : -INFINITY;
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
  // The keys of the choice: bits of probabilities, below them NaN, below NaN the experts that are no candidates. One
  // NaN among the logits makes the sum NaN, and so every probability.
  constexpr int kNan = -1, kGone = -2;
  int keys[PerLane];
#pragma unroll
  for (int i = 0; i < PerLane; i++) {
    const float share = p[i] / sum;
    keys[i] = i * 32 + lane >= experts ? kGone : isnan(share) ? kNan : __float_as_int(share);
  }
  int my_id = 0;  // lane j has the j-th best
  float my_weight = 0.0f, total = 0.0f;
  for (int j = 0; j < k; j++) {
    int own = kGone, id = kMaxExperts;
#pragma unroll
    for (int i = 0; i < PerLane; i++) {
      if (keys[i] > own) {
        own = keys[i];
        id = i * 32 + lane;
      }
    }
    const int best = __reduce_max_sync(kAllLanes, own);
    id = __reduce_min_sync(kAllLanes, own == best ? id : kMaxExperts);
#pragma unroll
    for (int i = 0; i < PerLane; i++) {
      if (i * 32 + lane == id) keys[i] = kGone;
    }
    const float weight = best == kNan ? NAN : __int_as_float(best);
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
    weights[token * k + rank] = round_element(my_weight);
  }
}

template <int PerLane>
void route(const MoeShape& s, const MoeScratch& scratch, int64_t count, cudaStream_t stream, RouteRecord record,
           const int32_t* kv_slots) {
  const auto blocks = static_cast<unsigned>((count + kRouteWarps - 1) / kRouteWarps);
  launch_early(route_kernel<PerLane>, true, blocks, kRouteWarps * 32, stream, "launch of the expert choice",
               scratch.logits, static_cast<int>(count), s.experts, s.per_token, s.norm_topk_prob, kv_slots, scratch.ids,
               scratch.weights, scratch.slots, record);
}

// Exclusive prefix of v over the block's threads; `total` becomes their sum. `shared`: one per warp, not in use; the
// next call needs other memory, or a barrier before it.
__device__ __forceinline__ int block_prefix(int v, int* shared, int& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = v;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int before = __shfl_up_sync(kAllLanes, sum, offset);
    if (lane >= offset) sum += before;
  }
  if (lane == 31) shared[warp] = sum;
  __syncthreads();
  constexpr int kWarps = kSortThreads / 32;
  const int own = lane < kWarps ? shared[lane] : 0;
  int all = own;
#pragma unroll
  for (int offset = 1; offset < kWarps; offset *= 2) {
    const int before = __shfl_up_sync(kAllLanes, all, offset);
    if (lane >= offset) all += before;
  }
  total = __shfl_sync(kAllLanes, all, kWarps - 1);
  return sum - v + __shfl_sync(kAllLanes, all - own, warp);
}

// Rows of each tile of an expert with `rows` rows: as few tiles as possible, of about equal size.
__device__ __forceinline__ int rows_of_tile(int rows, int tile_rows) {
  const int tiles = (rows + tile_rows - 1) / tile_rows;
  return tiles == 0 ? tile_rows : min((((rows + tiles - 1) / tiles) + 7) / 8 * 8, tile_rows);
}

// One block per expert. The list of tiles begins with the tallest, so blocks that share out the list in turn get about
// equal work; experts of the same height are in order. Each block counts all experts, so blocks do not wait for each
// other. A thread reads four adjacent pairs at a time; `pairs` may end within them.
__global__ void __launch_bounds__(kSortThreads)
    sort_kernel(const int32_t* ids, int pairs, int experts, int k, int tile_rows, int32_t* __restrict__ slots,
                int32_t* __restrict__ tokens, RowTile* __restrict__ tiles, int32_t* __restrict__ tile_count) {
  let_next_kernel_begin();
  __shared__ int rows[kMaxExperts];
  __shared__ int warp_sums[2][kSortThreads / 32];
  const int expert = blockIdx.x;
  const auto read = [&](int i) {  // -1: no pair
    if (i + 3 < pairs) return *reinterpret_cast<const int4*>(ids + i);
    return make_int4(i < pairs ? ids[i] : -1, i + 1 < pairs ? ids[i + 1] : -1, i + 2 < pairs ? ids[i + 2] : -1, -1);
  };
  for (int e = threadIdx.x; e < experts; e += kSortThreads) rows[e] = 0;
  __syncthreads();
  wait_for_kernel_before();
  for (int i = threadIdx.x * 4; i < pairs; i += kSortThreads * 4) {
    const int4 four = read(i);
    for (int id : {four.x, four.y, four.z, four.w}) {
      if (id >= 0) atomicAdd(&rows[id], 1);
    }
  }
  __syncthreads();
  const auto tiles_of = [&](int count) {
    const int each = rows_of_tile(count, tile_rows);
    return (count + each - 1) / each;
  };
  const int mine = rows[expert], my_tiles = tiles_of(mine), each = rows_of_tile(mine, tile_rows);
  int rows_before = 0, tiles_before = 0, all_tiles = 0;  // of the experts before this one, in both orders
  for (int e = threadIdx.x; e < experts; e += kSortThreads) {
    const int count = rows[e], other = rows_of_tile(count, tile_rows), tiles = tiles_of(count);
    if (e < expert) rows_before += count;
    if (other > each || (other == each && e < expert)) tiles_before += tiles;
    all_tiles += tiles;
  }
  int first, first_tile, sum;
  block_prefix(rows_before, warp_sums[0], first);
  block_prefix(tiles_before, warp_sums[1], first_tile);
  block_prefix(all_tiles, warp_sums[0], sum);
  if (expert == 0 && threadIdx.x == 0) *tile_count = sum;
  for (int i = threadIdx.x; i < my_tiles; i += kSortThreads) {
    tiles[first_tile + i] = {expert, first + i * each, min(each, mine - i * each)};
  }
  if (mine == 0) return;
  for (int begin = 0, turn = 1; begin < pairs; begin += kSortThreads * 4, turn ^= 1) {
    const int i = begin + static_cast<int>(threadIdx.x) * 4;
    const int4 four = read(i);
    const bool here[4] = {four.x == expert, four.y == expert, four.z == expert, four.w == expert};
    // Two buffers need one barrier per turn: a thread that writes this buffer again has passed the next turn's
    // barrier, which all readers of this turn reached after reading.
    int slot = first + block_prefix(here[0] + here[1] + here[2] + here[3], warp_sums[turn], sum);
    first += sum;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if (!here[j]) continue;
      slots[i + j] = slot;
      tokens[slot++] = (i + j) / k;
    }
  }
}

template <int Width, class T>
struct alignas(Width * sizeof(T)) Pack {
  T v[Width];
};

// Blocks (columns, token). Value: Element, or float for partial sums. Width: columns of one thread.
template <class Value, int Width>
__global__ void __launch_bounds__(kCombineThreads)
    combine_kernel(const Value* out, const int32_t* slots, const float* weights, int k, int64_t hidden,
                   Element* __restrict__ y) {
  let_next_kernel_begin();
  wait_for_kernel_before();
  constexpr bool kPartial = sizeof(Value) == 4;
  const int64_t token = blockIdx.y;
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * kCombineThreads + threadIdx.x) * Width;
  if (column >= hidden) return;
  float sum[Width] = {};
#pragma unroll 8
  for (int j = 0; j < k; j++) {
    const float weight = weights[token * k + j];
    const auto from = *reinterpret_cast<const Pack<Width, Value>*>(out + slots[token * k + j] * hidden + column);
#pragma unroll
    for (int i = 0; i < Width; i++) {
      if constexpr (kPartial) {
        sum[i] += weight * from.v[i];
      } else {
        sum[i] = round_element(sum[i] + round_element(to_float(from.v[i]) * weight));
      }
    }
  }
  Pack<Width, Element> to;
#pragma unroll
  for (int i = 0; i < Width; i++) to.v[i] = to_element(sum[i]);
  *reinterpret_cast<Pack<Width, Element>*>(y + token * hidden + column) = to;
}

template <class Value, int Width>
void combine(const MoeShape& s, const MoeScratch& scratch, Element* y, int64_t count, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((s.outputs() + kCombineThreads * Width - 1) / (kCombineThreads * Width));
  launch_early(combine_kernel<Value, Width>, true, dim3(blocks, static_cast<unsigned>(count)), kCombineThreads, stream,
               "launch of the experts' sum", static_cast<const Value*>(scratch.out), scratch.slots, scratch.weights,
               s.per_token, s.outputs(), y);
}

}  // namespace

void choose_experts(const MoeShape& s, const MoeScratch& scratch, int64_t count, cudaStream_t stream,
                    RouteRecord record, const int32_t* kv_slots) {
  if (s.experts <= 32) return route<1>(s, scratch, count, stream, record, kv_slots);
  if (s.experts <= 64) return route<2>(s, scratch, count, stream, record, kv_slots);
  if (s.experts <= 128) return route<4>(s, scratch, count, stream, record, kv_slots);
  if (s.experts <= 256) return route<8>(s, scratch, count, stream, record, kv_slots);
  return route<kMaxExperts / 32>(s, scratch, count, stream, record, kv_slots);
}

void sort_by_expert(const MoeShape& s, const MoeScratch& scratch, int64_t count, int tile_rows, cudaStream_t stream) {
  launch_early(sort_kernel, true, static_cast<unsigned>(s.experts), kSortThreads, stream,
               "launch of the sort by expert", scratch.ids, static_cast<int>(count * s.per_token), s.experts,
               s.per_token, tile_rows, scratch.slots, scratch.tokens, scratch.tiles, scratch.tile_count);
}

void combine_experts(const MoeShape& s, const MoeScratch& scratch, Element* y, int64_t count, bool partial,
                     cudaStream_t stream) {
  const bool wide = s.outputs() % 8 == 0 && reinterpret_cast<uintptr_t>(y) % 16 == 0;
  if (partial) {
    wide ? combine<float, 8>(s, scratch, y, count, stream) : combine<float, 1>(s, scratch, y, count, stream);
  } else {
    wide ? combine<Element, 8>(s, scratch, y, count, stream) : combine<Element, 1>(s, scratch, y, count, stream);
  }
}

void prepare_moe_route() {
  load_kernels("loading a kernel of the experts", route_kernel<1>, route_kernel<2>, route_kernel<4>, route_kernel<8>,
               route_kernel<kMaxExperts / 32>, sort_kernel, combine_kernel<Element, 1>, combine_kernel<Element, 8>,
               combine_kernel<float, 1>, combine_kernel<float, 8>);
}

}  // namespace refit::cuda
