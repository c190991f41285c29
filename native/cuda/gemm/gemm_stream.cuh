// The product of few rows of x with 16 rows of w. A block reads its rows of w once, at the speed of memory.
//
// Tensor cores do the arithmetic at almost no cost: the 16 rows of w are the first operand, the rows of x (padded to 8
// or 16) the second, so the number of instructions per byte of w hardly grows with M. The order of k within a product
// is free if both operands agree. So a thread uses the 16 bytes that it loads, 8 adjacent k, as its part of two
// products, without shared memory.
//
// K is cut into runs of 128 that are dealt to the block's eight warps in turn. Their sums are added in shared memory in
// the order of warps. Nothing of this depends on M: the bits of a row are the same whatever rows come with it.
#pragma once
#include "cuda/device/early_launch.cuh"
#include "cuda/gemm/gemm_mma.cuh"

namespace refit::cuda {

constexpr int kStreamRows = 16;   // of w for one block
constexpr int kStreamWarps = 8;   // of a block
constexpr int kStreamBlocks = 4;  // of 32 along k, in one run of a warp
constexpr int kStreamRun = kStreamBlocks * 32;
constexpr int kStreamOneRun = kStreamWarps * kStreamRun;  // of all warps
constexpr int kStreamThreads = kStreamWarps * 32;
constexpr int kStreamMaxTiles = 2;  // of 8 rows of x

// The pointers that thread 4 g + t of each warp reads from: each is past the row's first 8 t elements.
template <int Tiles>
struct StreamRows {
  const Element* w[2];      // rows g and g + 8 of the 16
  const Element* x[Tiles];  // row g of each eight; null past the last
};

// The part of w that one warp needs for one run.
struct StreamRun {
  uint4 low[kStreamBlocks], high[kStreamBlocks];
};

template <int Tiles>
__device__ __forceinline__ StreamRun stream_fetch(const StreamRows<Tiles>& rows, int k, int t, int K) {
  StreamRun run;
#pragma unroll
  for (int b = 0; b < kStreamBlocks; b++) {
    const bool there = k + b * 32 + t * 8 < K;
    run.low[b] = load_once(rows.w[0] + k + b * 32, there);
    run.high[b] = load_once(rows.w[1] + k + b * 32, there);
  }
  return run;
}

// Sums of all warps: element (warp, m, n) belongs to x's row m and w's row n. Rows are padded against bank conflicts.
template <int Tiles>
struct StreamSums {
  static constexpr int kRow = kStreamRows + 1;
  float part[kStreamWarps][Tiles * 8][kRow];

  __device__ __forceinline__ float total(int m, int n) const {
    float sum = part[0][m][n];
#pragma unroll
    for (int warp = 1; warp < kStreamWarps; warp++) sum += part[warp][m][n];
    return sum;
  }
};

// All threads of the block call it; then sums.total is valid in all of them. K must be a multiple of 8, rows of w and x
// must be aligned to 16 bytes. wait() is called before the first load of x. OneRun: K is at most kStreamOneRun, and
// then fewer registers are used.
//
// The next kernel begins when w has been read: before, its blocks would crowd on the multiprocessors that are free
// first, and then compute or read w there for longer than the others.
template <int Tiles, bool OneRun, class Wait>
__device__ __forceinline__ void stream_product(const StreamRows<Tiles>& rows, int K, StreamSums<Tiles>& sums,
                                               Wait wait) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  float acc[Tiles][4] = {};
  int k = warp * kStreamRun;
  StreamRun now = stream_fetch(rows, k, t, K);
  wait();
  for (; k < K; k += kStreamOneRun) {
    // x first: it is close, and must not wait behind the next run of w.
    uint4 x[Tiles][kStreamBlocks];
#pragma unroll
    for (int b = 0; b < kStreamBlocks; b++) {
      const bool there = k + b * 32 + t * 8 < K;
#pragma unroll
      for (int i = 0; i < Tiles; i++) x[i][b] = load_fresh(rows.x[i] + k + b * 32, there && rows.x[i] != nullptr);
    }
    const StreamRun next = OneRun ? now : stream_fetch(rows, k + kStreamOneRun, t, K);
#pragma unroll
    for (int b = 0; b < kStreamBlocks; b++) {
      const uint4 low = now.low[b], high = now.high[b];
#pragma unroll
      for (int i = 0; i < Tiles; i++) {
        mma(acc[i], low.x, high.x, low.y, high.y, x[i][b].x, x[i][b].y);
        mma(acc[i], low.z, high.z, low.w, high.w, x[i][b].z, x[i][b].w);
      }
    }
    if constexpr (OneRun) break;
    now = next;
  }
#pragma unroll
  for (int i = 0; i < Tiles; i++) {
    const int m = i * 8 + 2 * t;
    sums.part[warp][m][g] = acc[i][0];
    sums.part[warp][m + 1][g] = acc[i][1];
    sums.part[warp][m][g + 8] = acc[i][2];
    sums.part[warp][m + 1][g + 8] = acc[i][3];
  }
  __syncthreads();
  let_next_kernel_begin();
}

}  // namespace refit::cuda
