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

// A kernel of adapters is so short that its instructions count: offsets have 32 bits, from one pointer of the thread.

// A lane has the 8 columns from expand_chunk() on of the warp's 32, in row expand_row() of each half. It loads 8
// elements of B from the same chunk on, in each of four columns: expand_column() and those 2, 4 and 6 behind it.
__device__ __forceinline__ int expand_chunk() { return static_cast<int>(threadIdx.x) % 4 * 8; }
__device__ __forceinline__ int expand_row() { return static_cast<int>(threadIdx.x) % 32 / 4; }
__device__ __forceinline__ int expand_column() { return expand_row() / 2 * 8 + expand_row() % 2; }

// B of the tiles that a warp computes next, on its way to shared memory. Registers would hold one tile, which is too
// few bytes in flight. A thread reads only what it has copied itself, so no barrier is needed. More stages would take
// L1 from the kernels that begin while this one ends.
template <int Slices>  // of B that a tile needs
struct ExpandRing {
  static constexpr int kStages = 2;
  uint4 memory[kStages][4 * Slices][kExpandThreads];

  // Copies the first 32 of the slot's `ld` columns of B. b: at this thread's first column and chunk; `columns` of them
  // exist from that column on. One commit_async() follows for each tile, also for one that does not exist.
  __device__ __forceinline__ void copy(int stage, int slice, const Element* b, int ld, int columns) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(&memory[stage][4 * slice + j][threadIdx.x]));
      copy_async(to, b + 2 * j * ld, 2 * j < columns && expand_chunk() < ld ? 16 : 0);
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
  const Element *b, *t;
  int ldt, ldb, columns, rows;
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
  __device__ __forceinline__ void place(const Element* first_t, int pitch, int all_rows, const Element* first_b, int ld,
                                        int all_columns) {
    b = first_b + expand_column() * ld, ldb = ld;
    columns = min(all_columns, kExpandColumns) - expand_column();
    t = first_t + expand_row() * pitch, ldt = pitch, rows = all_rows - expand_row();
  }
  // Loads the first 32 of the slot's `ld` columns of B, before the adapter's own rank is known.
  __device__ __forceinline__ void start(const Element* first_t, int pitch, int all_rows, const Element* first_b, int ld,
                                        int all_columns) {
    place(first_t, pitch, all_rows, first_b, ld, all_columns);
    load_b(expand_chunk(), ld);
  }
  // rank: a multiple of 16. Columns of t from there on hold anything. Reads t.
  __device__ __forceinline__ void finish(int rank) {
    load_t(expand_chunk(), rank);
    multiply();
    finish_rest(rank);
  }
  __device__ __forceinline__ void finish_rest(int rank) {
#pragma unroll 1
    for (int k = 32; k < rank; k += 32) {
      load_b(k + expand_chunk(), rank);
      load_t(k + expand_chunk(), rank);
      multiply();
    }
  }
  // The same with B from a ring. x holds the first 32 of the slot's columns of t, which were loaded before the
  // adapter's own rank was known.
  template <int Slices>
  __device__ __forceinline__ void finish(int rank, const ExpandRing<Slices>& ring, int stage, int slice) {
#pragma unroll
    for (int j = 0; j < 4; j++) w[j] = ring.memory[stage][4 * slice + j][threadIdx.x];
    if (expand_chunk() >= rank) {
#pragma unroll
      for (int h = 0; h < Halves; h++) x[h] = make_uint4(0, 0, 0, 0);
    }
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

__device__ __forceinline__ float as_float(Element v) { return to_float(v); }
__device__ __forceinline__ float as_float(float v) { return v; }

// Eight adjacent elements of y. kVector: they may be moved in 16 bytes.
template <class Out>
struct Eight {
  Out v[8];

  // += scale * the sums of half h.
  template <int Halves>
  __device__ __forceinline__ void add(float scale, const ExpandWarp<Halves>& warp, int h) {
#pragma unroll
    for (int e = 0; e < 8; e += 2) {
      put_pair(&v[e], __fmaf_rn(scale, warp.sum(h, e), as_float(v[e])),
               __fmaf_rn(scale, warp.sum(h, e + 1), as_float(v[e + 1])));
    }
  }
  template <bool kVector>
  __device__ __forceinline__ void load(const Out* from, int there) {
    if constexpr (kVector) {
#pragma unroll
      for (size_t i = 0; i < sizeof(v) / 16; i++) {
        reinterpret_cast<uint4*>(v)[i] = load_fresh(reinterpret_cast<const Element*>(from) + 8 * i, there >= 8);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; i++) {
        if (i < there) v[i] = from[i];
      }
    }
  }
  template <bool kVector>
  __device__ __forceinline__ void store(Out* to, int there) const {
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

}  // namespace refit::cuda
