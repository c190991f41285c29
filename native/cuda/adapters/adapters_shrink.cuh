// The product of some rows of x with rows of A, by sixteen warps: one block, or a cluster of smaller blocks.
//
// As in gemm_stream.cuh, rows of A are the first operand and rows of x the second, and a thread uses the 16 bytes that
// it loads as its part of two products. K is cut into runs of 128 that are dealt to the warps in turn; their sums are
// added in the order of warps. Neither depends on the number of tiles or of blocks, so the bits of a result do not.
//
// Few rows wait for memory and not for the tensor cores. So a warp has many loads in flight: with K = 4096 all of them.
// A cluster spreads them over more multiprocessors, and its small blocks find room beside those of other kernels.
#pragma once
#include "cuda/adapters/adapters_device.cuh"
#include "cuda/device/cluster.cuh"

namespace refit::cuda {

constexpr int kShrinkWarps = 16;
constexpr int kShrinkThreads = kShrinkWarps * 32;  // of a block without a cluster
constexpr int kShrinkRows = 16;                    // of A, in one tile
constexpr int kShrinkTokens = 8;                   // rows of x, in one tile
constexpr int kShrinkRun = 128, kShrinkSteps = kShrinkRun / 32;

// RowTiles tiles of A by TokenTiles tiles of x. Ahead: steps of 32 along k that are loaded before they are multiplied.
// Blocks: of the cluster, which has the warps in the order of its blocks.
template <int RowTiles, int TokenTiles, int Ahead, bool Aligned, int Blocks = 1>
struct ShrinkBlock {
  static constexpr int kWarps = kShrinkWarps / Blocks, kThreads = kWarps * 32;
  static constexpr int kTokens = TokenTiles * kShrinkTokens;
  static constexpr int kTogether = TokenTiles < 4 ? TokenTiles : 4;  // tiles of x that are summed at a time
  // Rows are padded against bank conflicts.
  using Sums = float[kWarps][kTogether * kShrinkTokens][kShrinkRows + 1];
  struct Step {
    uint4 a[RowTiles][2], x[TokenTiles];
  };

  // Thread 4 g + t reads rows g and g + 8 of A (null: zeros), and row g of each tile of x, which is at x + row[j];
  // negative: zeros.
  const Element* a[RowTiles];
  const Element* x;
  int row[TokenTiles];

  static __device__ __forceinline__ int rank() { return Blocks == 1 ? 0 : cluster_rank(); }
  static __device__ __forceinline__ void sync() {
    if constexpr (Blocks == 1) {
      __syncthreads();
    } else {
      cluster_sync();
    }
  }
  static __device__ __forceinline__ float sum_of(const Sums& sums, int warp, int m, int n) {
    if constexpr (Blocks == 1) {
      return sums[warp][m][n];
    } else {
      return cluster_load(&sums[warp % kWarps][m][n], warp / kWarps);
    }
  }
  static __device__ __forceinline__ int place(int step) {
    const int warp = rank() * kWarps + static_cast<int>(threadIdx.x) / 32;
    return (step / kShrinkSteps * kShrinkWarps + warp) * kShrinkRun + step % kShrinkSteps * 32 + threadIdx.x % 4 * 8;
  }
  __device__ __forceinline__ void fetch_a(Step& to, int step, int K) const {
    const int k = place(step);
#pragma unroll
    for (int i = 0; i < RowTiles; i++) {
      to.a[i][0] = adapter_load<Aligned>(a[i], k, K);
      to.a[i][1] = adapter_load<Aligned>(a[i] == nullptr ? nullptr : a[i] + 8 * int64_t{K}, k, K);
    }
  }
  __device__ __forceinline__ void fetch_x(Step& to, int step, int K) const {
    const int k = place(step);
#pragma unroll
    for (int j = 0; j < TokenTiles; j++) {
      to.x[j] = adapter_load<Aligned, true>(row[j] < 0 ? nullptr : x + row[j], k, K);
    }
  }

  // All threads of the cluster call it; memory of x and t is touched after wait(). done(tile of A, token, row in the
  // tile, sum) gets each result once.
  template <class Wait, class Done>
  __device__ __forceinline__ void run(int K, Sums& sums, Wait wait, Done done) const {
    float acc[RowTiles][TokenTiles][4] = {};
    const int runs = (K + kShrinkRun - 1) / kShrinkRun;
    const int steps = (runs + kShrinkWarps - 1) / kShrinkWarps * kShrinkSteps;  // the same for all warps
    Step ring[Ahead];
#pragma unroll
    for (int s = 0; s < Ahead; s++) fetch_a(ring[s], s, K);
    wait();
#pragma unroll
    for (int s = 0; s < Ahead; s++) fetch_x(ring[s], s, K);
    for (int step = 0; step < steps; step += Ahead) {
#pragma unroll
      for (int s = 0; s < Ahead; s++) {
        if (kShrinkSteps % Ahead != 0 && step + s >= steps) break;
        const Step& now = ring[s];
#pragma unroll
        for (int i = 0; i < RowTiles; i++) {
          const uint4 low = now.a[i][0], high = now.a[i][1];
#pragma unroll
          for (int j = 0; j < TokenTiles; j++) {
            mma(acc[i][j], low.x, high.x, low.y, high.y, now.x[j].x, now.x[j].y);
            mma(acc[i][j], low.z, high.z, low.w, high.w, now.x[j].z, now.x[j].w);
          }
        }
        if (step + s + Ahead < steps) {
          fetch_a(ring[s], step + s + Ahead, K);
          fetch_x(ring[s], step + s + Ahead, K);
        }
      }
    }
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < RowTiles; i++) {
#pragma unroll
      for (int first = 0; first < TokenTiles; first += kTogether) {
        if (i + first > 0) sync();
#pragma unroll
        for (int j = 0; j < kTogether; j++) {
          const int m = j * kShrinkTokens + 2 * t;
          const float(&part)[4] = acc[i][first + j];
          sums[warp][m][g] = part[0];
          sums[warp][m + 1][g] = part[1];
          sums[warp][m][g + 8] = part[2];
          sums[warp][m + 1][g + 8] = part[3];
        }
        sync();
        constexpr int kSums = kTogether * kShrinkTokens * kShrinkRows, kAllThreads = kThreads * Blocks;
        for (int at = rank() * kThreads + static_cast<int>(threadIdx.x); at < kSums; at += kAllThreads) {
          const int m = at / kShrinkRows, n = at % kShrinkRows;
          float sum = sum_of(sums, 0, m, n);
#pragma unroll
          for (int w = 1; w < kShrinkWarps; w++) sum += sum_of(sums, w, m, n);
          done(i, first * kShrinkTokens + m, n, sum);
        }
      }
    }
    if constexpr (Blocks > 1) sync();
  }
};

}  // namespace refit::cuda
