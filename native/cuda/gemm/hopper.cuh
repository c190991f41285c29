// The instructions of kernels for compute capability 9.0a: wgmma, mbarrier, the tensor copies of the copy engine, and
// register budgets (PTX ISA, "Asynchronous warpgroup level matrix instructions", "mbarrier", "cp.async.bulk.tensor").
// Only files named *_hopper.cu include it; CMakeLists.txt compiles them for 90a alone.
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

#include "cuda/device/types.h"

namespace refit::cuda {

// --- mbarrier: a phase ends when all arrivals and all expected bytes have come; waiters name the phase's parity.

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes the initialised barriers visible to the copy engine; a __syncthreads follows.
__device__ __forceinline__ void barriers_initialised() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_arrive_and_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Arrives when all earlier cp.async of this thread have ended; the barrier's count includes this arrival.
__device__ __forceinline__ void barrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// --- Copies of tiles of a tensor to shared memory. `map`: a __grid_constant__ parameter. `to` is aligned to 1024 bytes
// if the map swizzles by 128 bytes. The barrier receives the bytes of the whole box, those outside the tensor as zeros.

__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap& map, uint32_t barrier, int c0, int c1,
                                         int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
          "r"(to),
      "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap& map, uint32_t barrier, int c0, int c1, int c2,
                                         int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
      "[%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// Orders what other threads wrote to shared memory, seen by this thread, before its next wgmma or bulk copy.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- Registers. All warps of a warpgroup execute it; the sum over the block must not exceed what it was launched with.

template <int Count>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}
template <int Count>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}

// A barrier of some of the block's warps; `id`: 1 to 15 (0 is __syncthreads).
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// --- wgmma. A warpgroup is four warps, the first at a multiple of four.

// Describes operand rows of 64 bf16 (128 bytes) along k, swizzled by 128 bytes: chunk c (16 bytes) of row r is at place
// c ^ (r % 8), eight rows are 1024 bytes, and the tile begins at a multiple of 1024. k advances by 32 bytes per 16.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kStride = uint64_t{1024 >> 4} << 32, kLeading = uint64_t{1} << 16;
  return kSwizzle128 | kStride | kLeading | ((address & 0x3ffff) >> 4);
}

// Before the first wgmma, and after other code has touched its registers.
__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most `Pending` committed groups are pending.
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Sums of a warpgroup for 64 rows of a and N rows of b. Thread 4 g + t of warp w has in d[4 j ...]:
// (row 16 w + g, columns 8 j + 2 t and + 1), (row 16 w + g + 8, the same columns).
template <int N>
using WgmmaSums = float[N / 2];

// Lists of a wgmma's registers for N of 8, 16, 32, 64 and 128: their names in the assembly, and the operands.
#define REFIT_NAMES_8 "%0, %1, %2, %3"
#define REFIT_NAMES_16 \
  REFIT_NAMES_8        \
  ", %4, %5, %6, %7"
#define REFIT_NAMES_32 \
  REFIT_NAMES_16       \
  ", %8, %9, %10, %11, %12, %13, %14, %15"
#define REFIT_NAMES_64 \
  REFIT_NAMES_32       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define REFIT_NAMES_128                                                                        \
  REFIT_NAMES_64                                                                               \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49" \
  ", %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define REFIT_SUM_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define REFIT_SUM_8(i) REFIT_SUM_4(i), REFIT_SUM_4(i + 4)
#define REFIT_SUM_16(i) REFIT_SUM_8(i), REFIT_SUM_8(i + 8)
#define REFIT_SUM_32(i) REFIT_SUM_16(i), REFIT_SUM_16(i + 16)
#define REFIT_SUM_64(i) REFIT_SUM_32(i), REFIT_SUM_32(i + 32)
#define REFIT_WGMMA(N, COUNT, A, B, ADD)                                                                  \
  asm volatile(                                                                                           \
      "{\n"                                                                                               \
      ".reg .pred add;\n"                                                                                 \
      "setp.ne.b32 add, %" #ADD                                                                           \
      ", 0;\n"                                                                                            \
      "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" REFIT_NAMES_##N "}, %" #A ", %" #B     \
                                                                                   ", add, 1, 1, 0, 0;\n" \
                                                                                   "}"                    \
      : REFIT_SUM_##COUNT(At)                                                                             \
      : "l"(a), "l"(b), "r"(add))

// d[At ...] = a b^T, plus d if `add` is not 0; a [64, 16], b [N, 16], both described in shared memory.
template <int N, int At, int Count>
__device__ __forceinline__ void wgmma_piece(float (&d)[Count], uint64_t a, uint64_t b, int add) {
  static_assert(At + N / 2 <= Count);
  if constexpr (N == 8) {
    REFIT_WGMMA(8, 4, 4, 5, 6);
  } else if constexpr (N == 16) {
    REFIT_WGMMA(16, 8, 8, 9, 10);
  } else if constexpr (N == 32) {
    REFIT_WGMMA(32, 16, 16, 17, 18);
  } else if constexpr (N == 64) {
    REFIT_WGMMA(64, 32, 32, 33, 34);
  } else {
    static_assert(N == 128);
    REFIT_WGMMA(128, 64, 64, 65, 66);
  }
}
#undef REFIT_WGMMA

// The same for any multiple of 8, in pieces: 128 while they fit, then smaller powers of 2. A piece of 128 computes as
// long as it reads shared memory, so pieces cost little.
template <int N, int At = 0, int Count>
__device__ __forceinline__ void wgmma(float (&d)[Count], uint64_t a, uint64_t b, int add) {
  constexpr int kPiece = N >= 128 ? 128 : N >= 64 ? 64 : N >= 32 ? 32 : N >= 16 ? 16 : 8;
  wgmma_piece<kPiece, At>(d, a, b, add);
  if constexpr (N > kPiece) wgmma<N - kPiece, At + kPiece / 2>(d, a, b + kPiece * 128 / 16, add);
}

}  // namespace refit::cuda
