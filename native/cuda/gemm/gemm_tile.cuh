// The product of a tile of rows of x with a tile of rows of w by mma.sync, for any sizes and alignments. cp.async loads
// operands into a ring of stages in shared memory while earlier stages are multiplied.
//
// A stage holds 64 k of every row: 128 bytes in eight chunks of 16. Chunk c of row r is at place c ^ (r % 8), so
// neither the copies nor ldmatrix have bank conflicts.
#pragma once
#include "cuda/gemm/gemm_mma.cuh"

namespace refit::cuda {

// BM rows of x by BN rows of w; a warp computes WM by WN of them. BlocksPerSm limits the registers.
template <int BM, int BN, int WM, int WN, int Stages, int BlocksPerSm>
struct TileShape {
  static constexpr int kM = BM, kN = BN, kWarpM = WM, kWarpN = WN, kStages = Stages, kBlocks = BlocksPerSm;
  static constexpr int kK = 64;
  static constexpr int kRowBytes = kK * 2;
  static constexpr int kThreads = BM / WM * (BN / WN) * 32;
  static constexpr int kStageBytes = (BM + BN) * kRowBytes;
  static constexpr int kSharedBytes = Stages * kStageBytes;
  static constexpr int kMTiles = WM / 16, kNTiles = WN / 8;
  static_assert(WM % 16 == 0 && WN % 16 == 0 && BM % (kThreads / 8) == 0 && BN % (kThreads / 8) == 0);
  static_assert(kThreads / 8 % 8 == 0);  // all rows of a thread are equal modulo 8
};

using LargeTile = TileShape<128, 128, 64, 32, 3, 2>;
using SmallTile = TileShape<64, 64, 32, 32, 4, 3>;

// Aligned: rows of both operands begin at multiples of 16 bytes and K is a multiple of 8.
template <class S, bool Aligned>
struct TileProduct {
  static constexpr int kPassRows = S::kThreads / 8;  // rows of one operand that all threads copy at once
  static constexpr int kXRows = S::kM / kPassRows, kWRows = S::kN / kPassRows;
  using Sums = float[S::kMTiles][S::kNTiles][4];

  // Place in the tile of acc[i][j][2 h] (and of its right neighbour [2 h + 1]): row(i, h), column(j).
  static __device__ __forceinline__ int row(int i, int h) {
    const int warp = threadIdx.x / 32;
    return warp / (S::kN / S::kWarpN) * S::kWarpM + i * 16 + h * 8 + threadIdx.x % 32 / 4;
  }
  static __device__ __forceinline__ int column(int j) {
    const int warp = threadIdx.x / 32;
    return warp % (S::kN / S::kWarpN) * S::kWarpN + j * 8 + threadIdx.x % 4 * 2;
  }

  // x_row(r), w_row(r): pointers to readable rows of the tile, even if the result is not needed.
  // shared: S::kSharedBytes, aligned to 128. acc: zero or a sum to add to.
  template <class XRow, class WRow>
  static __device__ __forceinline__ void run(uint8_t* shared, XRow x_row, WRow w_row, int K, Sums& acc) {
    const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    const int chunk = threadIdx.x % 8, first = threadIdx.x / 8;
    const Element* x[kXRows];
    const Element* w[kWRows];
#pragma unroll
    for (int i = 0; i < kXRows; i++) x[i] = x_row(first + i * kPassRows) + chunk * 8;
#pragma unroll
    for (int i = 0; i < kWRows; i++) w[i] = w_row(first + i * kPassRows) + chunk * 8;
    const uint32_t place = first * S::kRowBytes + (chunk ^ (first % 8)) * 16;

    const auto copy = [&](uint32_t to, const Element* from, int k) {  // k: of the chunk's first element
      if constexpr (Aligned) {
        const bool there = k < K;
        copy_async(base + to, there ? from : from - k, there ? 16 : 0);
      } else {
        uint32_t word[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const uint32_t a = k + 2 * i < K ? element_bits(from[2 * i]) : 0;
          const uint32_t b = k + 2 * i + 1 < K ? element_bits(from[2 * i + 1]) : 0;
          word[i] = a | b << 16;
        }
        *reinterpret_cast<uint4*>(shared + to) = make_uint4(word[0], word[1], word[2], word[3]);
      }
    };
    const auto fill = [&](int stage, int step) {
      const uint32_t to = stage * S::kStageBytes + place;
      const int k = step * S::kK;
#pragma unroll
      for (int i = 0; i < kXRows; i++) copy(to + i * kPassRows * S::kRowBytes, x[i] + k, k + chunk * 8);
#pragma unroll
      for (int i = 0; i < kWRows; i++) copy(to + (S::kM + i * kPassRows) * S::kRowBytes, w[i] + k, k + chunk * 8);
    };

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int warp_m = warp / (S::kN / S::kWarpN) * S::kWarpM, warp_n = warp % (S::kN / S::kWarpN) * S::kWarpN;
    // Order of x: rows 0-7 and 8-15 at the first chunk, then at the second; of w: the first eight rows at both chunks,
    // then the next eight. Row offsets are multiples of 8, so the place of a chunk depends on the lane only.
    const int x_lane = warp_m + lane % 16, x_chunk = lane / 16;
    const int w_lane = warp_n + lane % 8 + lane / 16 * 8, w_chunk = lane / 8 % 2;
    const uint32_t x_from = base + x_lane * S::kRowBytes, w_from = base + (S::kM + w_lane) * S::kRowBytes;

    const auto multiply = [&](int stage) {
      const uint32_t at = stage * S::kStageBytes;
#pragma unroll
      for (int step = 0; step < S::kK / 16; step++) {
        uint32_t a[S::kMTiles][4], b[S::kNTiles / 2][4];
#pragma unroll
        for (int i = 0; i < S::kMTiles; i++) {
          load_matrices(a[i], x_from + at + i * 16 * S::kRowBytes + ((step * 2 + x_chunk) ^ (lane % 8)) * 16);
        }
#pragma unroll
        for (int j = 0; j < S::kNTiles / 2; j++) {
          load_matrices(b[j], w_from + at + j * 16 * S::kRowBytes + ((step * 2 + w_chunk) ^ (lane % 8)) * 16);
        }
#pragma unroll
        for (int i = 0; i < S::kMTiles; i++) {
#pragma unroll
          for (int j = 0; j < S::kNTiles; j++) {
            mma(acc[i][j], a[i][0], a[i][1], a[i][2], a[i][3], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
          }
        }
      }
    };

    const int steps = (K + S::kK - 1) / S::kK;
#pragma unroll
    for (int s = 0; s < S::kStages - 1; s++) {
      if (s < steps) fill(s, s);
      commit_async();
    }
    int stage = 0, next = S::kStages - 1;
    for (int step = 0; step < steps; step++) {
      wait_async<S::kStages - 2>();  // the part of the stage that this thread copied has arrived
      __syncthreads();               // now the whole stage has arrived, and no thread reads stage `next` any more
      if (step + S::kStages - 1 < steps) fill(next, step + S::kStages - 1);
      commit_async();
      multiply(stage);
      if (++stage == S::kStages) stage = 0;
      if (++next == S::kStages) next = 0;
    }
  }
};

}  // namespace refit::cuda
