// The experts' products by wgmma. Rows of w are the operand of 64 rows of each warpgroup, the rows of x (the tokens of
// an expert) are the other, so few rows are wasted (at most 15, of Many below 128 at most 31), and each w is read once
// per tile.
//
// Blocks are persistent: block b computes the items b, b + blocks, ... of all (row tile, column tile). One warpgroup
// loads, two compute 64 rows of w each. Stages of 64 k go through a ring in shared memory: w by the copy engine, in the
// order that its map describes, x row by row by cp.async. The loads of the next item begin while this one ends.
#include "cuda/device/check.h"
#include "cuda/device/driver.h"
#include "cuda/device/early_launch.cuh"
#include "cuda/gemm/hopper.cuh"
#include "cuda/moe/moe_products.cuh"

namespace refit::cuda {
namespace {

constexpr int kLoaders = 128, kConsumers = 2;  // threads that load, warpgroups that compute
constexpr int kThreads = kLoaders + kConsumers * 128;
constexpr int kStageK = 64;                     // 128 bytes of a row
constexpr int kWRows = 64 * kConsumers;         // of one item
constexpr int kWBytes = kWRows * kStageK * 2;   // of a stage
constexpr int kLoadRows = kLoaders * 16 / 128;  // rows of x that the loaders copy at once
constexpr int kAhead = 8;                       // stages

// Rows of x in a row tile: at most MostRows; less than LeastRows cost as much as LeastRows.
template <int LeastRows, int MostRows>
struct RowShape {
  static constexpr int kMostRows = MostRows, kLeastRows = LeastRows;
  static constexpr int kXBytes = MostRows * kStageK * 2;
  static constexpr int kStageBytes = kWBytes + kXBytes;
  static constexpr int kStages = 192 * 1024 / kStageBytes;
  static constexpr int kPasses = MostRows / kLoadRows;
};

// Results of one warpgroup on their way to rows of y, a chunk of tokens at a time. Rows are padded by 16 bytes against
// bank conflicts.
template <class Kind>
struct Staging {
  using Out = typename Kind::Out;
  static constexpr int kColumns = 64 / Kind::kRowsPerColumn;
  static constexpr int kTokens = sizeof(Out) == 2 ? 64 : 32;
  static constexpr int kPitch = kColumns * static_cast<int>(sizeof(Out)) + 16;
};
constexpr int kStagingBytes = 64 * 144;  // of a warpgroup: the most of all kinds
static_assert(Staging<Down<float>>::kTokens * Staging<Down<float>>::kPitch <= kStagingBytes);

template <class S>
struct Ring {
  // Begins at a multiple of 1024 bytes: stages, then staging, then barriers.
  static constexpr int kStaging = S::kStages * S::kStageBytes;
  static constexpr int kBarriers = kStaging + kConsumers * kStagingBytes;
  static constexpr int kBytes = kBarriers + 2 * S::kStages * 8;
  static constexpr int kSharedBytes = kBytes + 1024;  // for the alignment

  uint32_t base;
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ uint32_t w() const { return base + stage * S::kStageBytes; }
  __device__ __forceinline__ uint32_t x() const { return w() + kWBytes; }
  __device__ __forceinline__ uint32_t full(int s) const { return base + kBarriers + s * 8; }
  __device__ __forceinline__ uint32_t empty(int s) const { return full(S::kStages + s); }
  __device__ __forceinline__ void next() {
    if (++stage < S::kStages) return;
    stage = 0;
    parity ^= 1;
  }
};

template <class Kind>
__device__ __forceinline__ void copy_w(const CUtensorMap& map, uint32_t to, uint32_t barrier, int k, int n0,
                                       int expert) {
  if constexpr (Kind::kRowsPerColumn == 2) {
    copy_box(to, map, barrier, k, 0, 0, n0 / 8, expert);
  } else {
    copy_box(to, map, barrier, k, n0, expert);
  }
}

// A row tile and the first of its columns.
struct Item {
  RowTile tile;
  int n0;
};

// Row r of w for an item; null if it has no rows.
template <class Kind>
__device__ __forceinline__ const Element* w_row(const Experts& e, const Item& item, int r) {
  return item.tile.rows == 0 ? nullptr : e.w + Kind::w_row(item.tile.expert, item.n0, r, e.N) * e.K;
}
// The ring is too short for the latency of memory, so each row of w is loaded into the L2 cache kAhead stages earlier.
__device__ __forceinline__ void prefetch_ahead(const Element* now, const Element* later, int k, int K) {
  int at = k + kAhead * kStageK;
  const Element* from = now;
  if (at >= K) {
    at -= K;
    from = later;
  }
  if (from != nullptr && at < K) asm volatile("prefetch.global.L2 [%0];" ::"l"(from + at));
}

// Loads all stages of an item, and the first rows of w of the next into the L2 cache.
template <class Kind, class S>
__device__ __forceinline__ void load_item(const CUtensorMap& map, const Experts& e, const Item& item, const Item& next,
                                          Ring<S>& ring) {
  const int thread = threadIdx.x, chunk = thread % 8, first = thread / 8;
  const RowTile& tile = item.tile;
  int32_t rows[S::kPasses];
#pragma unroll
  for (int i = 0; i < S::kPasses; i++) {
    const int slot = tile.first + min(first + i * kLoadRows, tile.rows - 1);
    rows[i] = e.from != nullptr ? e.from[slot] : slot;
  }
  const Element* const now = w_row<Kind>(e, item, thread);
  const Element* const later = w_row<Kind>(e, next, thread);
  const uint32_t place = first * 128 + (chunk ^ (first % 8)) * 16;
  for (int k = 0; k < e.K; k += kStageK) {
    barrier_wait(ring.empty(ring.stage), ring.parity ^ 1);
    const uint32_t full = ring.full(ring.stage);
    if (thread == 0) {
      barrier_arrive_and_expect(full, kWBytes);
      copy_w<Kind>(map, ring.w(), full, k, item.n0, tile.expert);
    }
    const int own = k + chunk * 8;
    const bool there = own < e.K;
    const Element* const from = e.x + (there ? own : 0);
#pragma unroll
    for (int i = 0; i < S::kPasses; i++) {
      if (first + i * kLoadRows >= tile.rows) break;
      copy_async(ring.x() + place + i * kLoadRows * 128, from + int64_t{rows[i]} * e.K, there ? 16 : 0);
    }
    barrier_arrive_after_copies(full);
    if constexpr (S::kMostRows > 64) prefetch_ahead(now, later, k, e.K);
    ring.next();
  }
}

__device__ __forceinline__ void store_transposed(uint32_t address, uint32_t pair) {
  asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(address), "r"(pair) : "memory");
}

__device__ __forceinline__ uint32_t packed(float low, float high) {
  const Element2 pair = to_elements(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Puts tokens 8 j ... 8 j + 7 of this warp's columns into the staging, at its row `row`. v: the sums of wgmma.
template <class Kind>
__device__ __forceinline__ void stage_tokens(const Experts& e, const RowTile& tile, int n0, uint32_t staging,
                                             const float (&v)[4], int token, int row) {
  using Area = Staging<Kind>;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32 % 4;
  if constexpr (Kind::kRowsPerColumn == 2) {
    const int column = warp * 8, n = min(n0 + column + g, e.N - 1);
    const int64_t slot = tile.first + min(token + 2 * t, tile.rows - 1);
    const int64_t next = tile.first + min(token + 2 * t + 1, tile.rows - 1);
    const uint32_t pair = packed(finished<Kind>(e, slot, n, v[0], v[2]), finished<Kind>(e, next, n, v[1], v[3]));
    store_transposed(staging + (row + lane % 8) * Area::kPitch + column * 2, pair);
  } else if constexpr (sizeof(typename Kind::Out) == 2) {
    const uint32_t to = staging + (row + lane % 8) * Area::kPitch + warp * 32;
    store_transposed(to, packed(v[0], v[1]));
    store_transposed(to + 16, packed(v[2], v[3]));
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t to = staging + (row + 2 * t + i % 2) * Area::kPitch + (warp * 16 + i / 2 * 8 + g) * 4;
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(v[i]) : "memory");
    }
  }
}

// y of the item's rows and this warpgroup's columns, which begin at n0.
template <class Kind, int N>
__device__ __forceinline__ void store_item(const Experts& e, const RowTile& tile, int n0, uint32_t staging,
                                           typename Kind::Out* y, const float (&d)[N / 2]) {
  using Area = Staging<Kind>;
  constexpr int kPiece = 16 / sizeof(typename Kind::Out), kPieces = Area::kColumns / kPiece;  // of 16 bytes
  const int barrier = threadIdx.x / 128, thread = threadIdx.x % 128;
#pragma unroll
  for (int begin = 0; begin < N; begin += Area::kTokens) {
    constexpr int kTokens = Area::kTokens;
    named_barrier(barrier, 128);  // the chunk before has been read
#pragma unroll
    for (int j = begin / 8; j < min(begin + kTokens, N) / 8; j++) {
      stage_tokens<Kind>(e, tile, n0, staging, {d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3]}, j * 8,
                         j * 8 - begin);
    }
    named_barrier(barrier, 128);
    const int tokens = min(kTokens, tile.rows - begin);
#pragma unroll 4
    for (int i = thread; i < tokens * kPieces; i += 128) {
      const int token = i / kPieces, piece = i % kPieces, n = n0 + piece * kPiece;
      if (n >= e.N) continue;
      uint4 v;
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                   : "r"(staging + token * Area::kPitch + piece * 16));
      *reinterpret_cast<uint4*>(y + int64_t{tile.first + begin + token} * e.N + n) = v;
    }
  }
}

// Computes an item of at most N rows of x.
template <class Kind, class S, int N>
__device__ __forceinline__ void compute_item(const Experts& e, const RowTile& tile, int n0, Ring<S>& ring,
                                             typename Kind::Out* y) {
  const int group = threadIdx.x / 128 - 1, lane = threadIdx.x % 32;
  float d[N / 2] = {};
  int before = -1;  // the stage that the wgmma before reads
  for (int k = 0; k < e.K; k += kStageK) {
    barrier_wait(ring.full(ring.stage), ring.parity);
    fence_async_proxy();
    const uint64_t w = matrix_descriptor(ring.w() + group * 64 * 128), x = matrix_descriptor(ring.x());
    wgmma_begin();
#pragma unroll
    for (int step = 0; step < kStageK / 16; step++) wgmma<N>(d, w + step * 2, x + step * 2);
    wgmma_commit();
    wgmma_wait<1>();
    if (before >= 0 && lane == 0) barrier_arrive(ring.empty(before));
    before = ring.stage;
    ring.next();
  }
  wgmma_wait<0>();
  pin_registers(d);
  if (lane == 0) barrier_arrive(ring.empty(before));
  const int columns = Staging<Kind>::kColumns;
  store_item<Kind, N>(e, tile, n0 + group * columns, ring.base + Ring<S>::kStaging + group * kStagingBytes, y, d);
}

// Calls compute_item for the least N that holds the tile, of those that are worth a kernel of their own.
template <class Kind, class S, int N>
__device__ __forceinline__ void choose_item(const Experts& e, const RowTile& tile, int n0, Ring<S>& ring,
                                            typename Kind::Out* y) {
  if constexpr (N >= S::kMostRows) {
    compute_item<Kind, S, S::kMostRows>(e, tile, n0, ring, y);
  } else {
    if (tile.rows <= N) return compute_item<Kind, S, N>(e, tile, n0, ring, y);
    choose_item<Kind, S, N + (N < 32 ? 8 : N < 128 && S::kMostRows > 64 ? 32 : 16)>(e, tile, n0, ring, y);
  }
}

template <class Kind, class S>
__global__ void __launch_bounds__(kThreads, 1)
    wgmma_kernel(const __grid_constant__ CUtensorMap map, Experts e, typename Kind::Out* __restrict__ y) {
  // Not for the kernel behind Down: its blocks are small, and all of them would crowd on the multiprocessors that are
  // free first.
  if constexpr (Kind::kRowsPerColumn == 2) let_next_kernel_begin();
  constexpr int kColumns = kWRows / Kind::kRowsPerColumn;
  extern __shared__ uint8_t shared[];
  Ring<S> ring{(static_cast<uint32_t>(__cvta_generic_to_shared(shared)) + 1023) / 1024 * 1024};
  if (threadIdx.x == 0) {
    prefetch_map(map);
    for (int s = 0; s < S::kStages; s++) {
      barrier_init(ring.full(s), kLoaders + 1);
      barrier_init(ring.empty(s), kConsumers * 4);
    }
    barriers_initialised();
  }
  __syncthreads();
  wait_for_kernel_before();
  const int column_tiles = (e.N + kColumns - 1) / kColumns, items = *e.tile_count * column_tiles;
  const int begin = static_cast<int>(blockIdx.x), step = static_cast<int>(gridDim.x);
  const auto item_at = [&](int i) -> Item {
    if (i >= items) return {{0, 0, 0}, 0};
    return {e.tiles[i / column_tiles], i % column_tiles * kColumns};
  };
  if (threadIdx.x < kLoaders) {
    give_registers<104>();
    Item next = item_at(begin);
    for (int i = begin; i < items; i += step) {
      const Item item = next;
      next = item_at(i + step);
      load_item<Kind>(map, e, item, next, ring);
    }
  } else {
    take_registers<200>();
    for (int i = begin; i < items; i += step) {
      const Item item = item_at(i);
      choose_item<Kind, S, S::kLeastRows>(e, item.tile, item.n0, ring, y);
    }
  }
}

// Describes w [experts * rows, K] in boxes of kWRows rows and kStageK of k, in the order of GateUp::w_row or
// Down::w_row.
template <class Kind>
CUtensorMap make_map(const Experts& e, int experts) {
  CUtensorMap map;
  const auto K = static_cast<uint64_t>(e.K), N = static_cast<uint64_t>(e.N), E = static_cast<uint64_t>(experts);
  constexpr bool kTwo = Kind::kRowsPerColumn == 2;
  const uint64_t sizes[5] = {K, kTwo ? 8 : N, kTwo ? 2 : E, N / 8, E};
  const uint64_t strides[4] = {K * 2, N * K * 2, K * 16, N * K * 4};  // bytes; not of k
  const uint32_t box[5] = {kStageK, kTwo ? 8 : kWRows, kTwo ? 2 : 1, kWRows / 16, 1};
  const uint32_t steps[5] = {1, 1, 1, 1, 1};
  check(driver().encode_tiled(&map, kMapElement, kTwo ? 5 : 3, const_cast<Element*>(e.w), sizes, strides, box, steps,
                              CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                              CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
        "describing the experts' weights");
  return map;
}

template <class Kind, class S>
void launch(const Experts& e, const MoeShape& shape, typename Kind::Out* y, int64_t count, const ExpertLaunch& by,
            cudaStream_t stream) {
  constexpr int kColumns = kWRows / Kind::kRowsPerColumn;
  const int64_t row_tiles = max_row_tiles(count * shape.per_token, shape.experts, rows_of(by.kernel));
  const int64_t items = row_tiles * ((e.N + kColumns - 1) / kColumns);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(items, by.processors));
  launch_early_shared(wgmma_kernel<Kind, S>, true, blocks, kThreads, Ring<S>::kSharedBytes, stream,
                      "launch of the experts' wgmma kernel", make_map<Kind>(e, shape.experts), e, y);
}

using Few = RowShape<8, 64>;
using Many = RowShape<32, 256>;

template <class Kind, class S>
void allow() {
  check(cudaFuncSetAttribute(wgmma_kernel<Kind, S>, cudaFuncAttributeMaxDynamicSharedMemorySize, Ring<S>::kSharedBytes),
        "shared memory of the experts' wgmma kernel");
}

template <class Kind>
void prepare() {
  allow<Kind, Few>();
  allow<Kind, Many>();
}

}  // namespace

template <class Kind>
void wgmma_experts(const Experts& e, const MoeShape& shape, typename Kind::Out* y, int64_t count,
                   const ExpertLaunch& by, cudaStream_t stream) {
  if (by.kernel == ExpertKernel::kWgmma64) return launch<Kind, Few>(e, shape, y, count, by, stream);
  launch<Kind, Many>(e, shape, y, count, by, stream);
}

#define REFIT_WGMMA_EXPERTS(Kind)                                                                              \
  template void wgmma_experts<Kind>(const Experts&, const MoeShape&, Kind::Out*, int64_t, const ExpertLaunch&, \
                                    cudaStream_t)
REFIT_WGMMA_EXPERTS(GateUp);
REFIT_WGMMA_EXPERTS(AdaptedGateUp);
REFIT_WGMMA_EXPERTS(Down<Element>);
REFIT_WGMMA_EXPERTS(Down<float>);

void prepare_wgmma_experts() {
  prepare<GateUp>();
  prepare<AdaptedGateUp>();
  prepare<Down<Element>>();
  prepare<Down<float>>();
}

}  // namespace refit::cuda
