// scale * t Bᵀ for 8 * Halves rows and 32 adjacent columns of one slice, by one warp.
//
// Rows of t are the first operand, rows of B (columns of y) the second. The columns of the four tiles of eight are
// interleaved, so that a thread has 8 adjacent columns of y: 8 t to 8 t + 7 of the 32, in rows g and g + 8 of each
// tile.
#pragma once
#include <algorithm>

#include "cuda/adapters/adapters_device.cuh"

namespace refit::cuda {

constexpr int kExpandWarps = 4;
constexpr int kExpandThreads = kExpandWarps * 32;
constexpr int kExpandColumns = 32;  // of one warp
constexpr int kExpandHalf = 8;      // rows of t, half of a tile

// B of the tiles that a warp computes next, on its way to shared memory. Registers would hold one tile, which is too
// few bytes in flight while the warp waits for t and y. A thread reads only what it has copied itself, so no barrier is
// needed.
template <int Slices>  // of B that a tile needs
struct ExpandRing {
  static constexpr int kStages = 2;
  uint4 memory[kStages][4 * Slices][kExpandThreads];

  // Copies the first 32 of the slot's `ld` columns of B. first_b: B's row of the tile's first column; `all_columns` of
  // them exist. One commit_async() follows for each tile, also for one that does not exist.
  __device__ __forceinline__ void copy(int stage, int slice, const bf16* first_b, int ld, int64_t all_columns) {
    const int g = threadIdx.x % 32 / 4, chunk = threadIdx.x % 4 * 8, column = g / 2 * 8 + g % 2;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const bool there = column + 2 * j < all_columns && chunk < ld;
      const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(&memory[stage][4 * slice + j][threadIdx.x]));
      copy_async(to, there ? first_b + (column + 2 * j) * ld + chunk : first_b, there ? 16 : 0);
    }
  }
  // Waits for the oldest of the tiles in flight.
  static __device__ __forceinline__ void wait() { wait_async<kStages - 1>(); }
};

template <int Halves>
struct ExpandWarp {
  static constexpr int kTiles = (Halves + 1) / 2;
  float acc[kTiles][4][4] = {};
  // This thread's first column of B and first row of t, and how many columns and rows there are from these on.
  const bf16 *b, *t;
  int64_t ldt;
  int ldb, columns, rows;
  uint4 w[4], x[Halves];

  __device__ __forceinline__ void load_b(int k, int rank) {
#pragma unroll
    for (int j = 0; j < 4; j++) w[j] = adapter_load<true>(2 * j < columns ? b + 2 * j * ldb : nullptr, k, rank);
  }
  __device__ __forceinline__ void load_t(int k, int rank) {
#pragma unroll
    for (int h = 0; h < Halves; h++) x[h] = adapter_load<true, true>(8 * h < rows ? t + 8 * h * ldt : nullptr, k, rank);
  }
  __device__ __forceinline__ void multiply() {
#pragma unroll
    for (int i = 0; i < kTiles; i++) {
      const uint4 low = x[2 * i], high = 2 * i + 1 < Halves ? x[2 * i + 1] : make_uint4(0, 0, 0, 0);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        mma(acc[i][j], low.x, high.x, low.y, high.y, w[j].x, w[j].y);
        mma(acc[i][j], low.z, high.z, low.w, high.w, w[j].z, w[j].w);
      }
    }
  }

  // first_t: the first row's columns of this slice. first_b: B's row of the first column; `all_columns` of them exist.
  __device__ __forceinline__ void place(const bf16* first_t, int64_t pitch, int all_rows, const bf16* first_b, int ld,
                                        int64_t all_columns) {
    const int g = threadIdx.x % 32 / 4, column = g / 2 * 8 + g % 2;
    b = first_b + column * ld, ldb = ld;
    columns = static_cast<int>(min(all_columns, int64_t{kExpandColumns})) - column;
    t = first_t + g * pitch, ldt = pitch, rows = all_rows - g;
  }
  // Loads the first 32 of the slot's `ld` columns of B, before the adapter's own rank is known.
  __device__ __forceinline__ void start(const bf16* first_t, int64_t pitch, int all_rows, const bf16* first_b, int ld,
                                        int64_t all_columns) {
    place(first_t, pitch, all_rows, first_b, ld, all_columns);
    load_b(threadIdx.x % 4 * 8, ld);
  }
  // rank: a multiple of 16. Columns of t from there on hold anything. Reads t.
  __device__ __forceinline__ void finish(int rank) {
    load_t(threadIdx.x % 4 * 8, rank);
    multiply();
    finish_rest(rank);
  }
  __device__ __forceinline__ void finish_rest(int rank) {
    const int chunk = threadIdx.x % 4 * 8;
#pragma unroll 1
    for (int k = 32; k < rank; k += 32) {
      load_b(k + chunk, rank);
      load_t(k + chunk, rank);
      multiply();
    }
  }
  // The same with B from a ring, after place() and load_t(chunk, ld), which does not wait for the adapter's own rank.
  template <int Slices>
  __device__ __forceinline__ void finish(int rank, const ExpandRing<Slices>& ring, int stage, int slice) {
#pragma unroll
    for (int j = 0; j < 4; j++) w[j] = ring.memory[stage][4 * slice + j][threadIdx.x];
#pragma unroll
    for (int h = 0; h < Halves; h++)
      x[h] = static_cast<int>(threadIdx.x % 4 * 8) < rank ? x[h] : make_uint4(0, 0, 0, 0);
    multiply();
    finish_rest(rank);
  }
  // Element e of the 8 adjacent columns of this thread, in row 8 h + g.
  __device__ __forceinline__ float sum(int h, int e) const { return acc[h / 2][e / 2][2 * (h % 2) + e % 2]; }
};

// The compiler would make four stores of it.
__device__ __forceinline__ void store_16(void* to, uint4 v) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// Eight adjacent elements of y. kVector: they may be moved in 16 bytes.
template <class Out>
struct Eight {
  Out v[8];

  template <bool kVector>
  __device__ __forceinline__ void load(const Out* from, int64_t there) {
    if constexpr (kVector) {
#pragma unroll
      for (size_t i = 0; i < sizeof(v) / 16; i++) {
        reinterpret_cast<uint4*>(v)[i] = load_fresh(reinterpret_cast<const bf16*>(from) + 8 * i, there >= 8);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; i++) {
        if (i < there) v[i] = from[i];
      }
    }
  }
  template <bool kVector>
  __device__ __forceinline__ void store(Out* to, int64_t there) const {
    if constexpr (kVector) {
      if (there >= 8) {
#pragma unroll
        for (size_t i = 0; i < sizeof(v) / 16; i++) {
          store_16(reinterpret_cast<uint4*>(to) + i, reinterpret_cast<const uint4*>(v)[i]);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; i++) {
        if (i < there) to[i] = v[i];
      }
    }
  }
};

// Blocks along the columns, of so many tiles for each part of a step. All blocks are on the GPU together, and each
// computes several tiles, so that it loads the next ones meanwhile. Bits do not depend on the number.
inline unsigned expand_blocks(int64_t tiles, int64_t parts) {
  constexpr int64_t kTogether = 132 * 4, kMostTiles = 16;
  const int64_t each = std::clamp((tiles * parts + kTogether / 2) / kTogether, int64_t{1}, kMostTiles);
  return static_cast<unsigned>((tiles + each - 1) / each);
}

__device__ __forceinline__ float as_float(bf16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float as_float(float v) { return v; }

}  // namespace refit::cuda
