// The instructions of kernels for compute capability 9.0a: wgmma, mbarrier, the tensor copies of the copy engine, and
// register budgets (PTX ISA, "Asynchronous warpgroup level matrix instructions", "mbarrier", "cp.async.bulk.tensor").
// Only files named *_hopper.cu include it; CMakeLists.txt compiles them for 90a alone.
#pragma once
#include <cuda.h>

#include <cstdint>

#include "cuda/device/types.h"

namespace refit::cuda {

constexpr CUtensorMapDataType kMapElement =
    of_element(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_DATA_TYPE_FLOAT16);

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
__device__ __forceinline__ void barrier_arrive(uint32_t barrier, int times) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(times) : "memory");
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
// Arrives at it without a wait.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// --- wgmma. A warpgroup is four warps, the first at a multiple of four.

// Describes operand rows of 64 Elements (128 bytes) along k, swizzled by 128 bytes: chunk c (16 bytes) of row r is at
// place c ^ (r % 8), eight rows are 1024 bytes, and the tile begins at a multiple of 1024. k advances by 32 bytes
// per 16.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kStride = uint64_t{1024 >> 4} << 32, kLeading = uint64_t{1} << 16;
  return kSwizzle128 | kStride | kLeading | ((address & 0x3ffff) >> 4);
}

// Describes an operand [16, N] whose rows along k contain 64 of the N columns (128 bytes), swizzled in the same way.
// The next 64 columns are `columns_64` bytes behind; k advances by 2048 bytes per 16.
__device__ __forceinline__ uint64_t transposed_descriptor(uint32_t address, uint32_t columns_64) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kStride = uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kStride | uint64_t{columns_64 >> 4} << 16 | ((address & 0x3ffff) >> 4);
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

// Lists of a wgmma's registers: their names in the assembly, and the operands.
#define REFIT_SUM_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define REFIT_SUM_8(i) REFIT_SUM_4(i), REFIT_SUM_4(i + 4)
#define REFIT_NAMES_8 "%0, %1, %2, %3"
#define REFIT_SUMS_8 REFIT_SUM_4(0)
#define REFIT_NAMES_16 REFIT_NAMES_8 ", %4, %5, %6, %7"
#define REFIT_SUMS_16 REFIT_SUMS_8, REFIT_SUM_4(4)
#define REFIT_NAMES_24 REFIT_NAMES_16 ", %8, %9, %10, %11"
#define REFIT_SUMS_24 REFIT_SUMS_16, REFIT_SUM_4(8)
#define REFIT_NAMES_32 REFIT_NAMES_24 ", %12, %13, %14, %15"
#define REFIT_SUMS_32 REFIT_SUMS_24, REFIT_SUM_4(12)
#define REFIT_NAMES_48 REFIT_NAMES_32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define REFIT_SUMS_48 REFIT_SUMS_32, REFIT_SUM_8(16)
#define REFIT_NAMES_64 REFIT_NAMES_48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define REFIT_SUMS_64 REFIT_SUMS_48, REFIT_SUM_8(24)
#define REFIT_NAMES_80 REFIT_NAMES_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define REFIT_SUMS_80 REFIT_SUMS_64, REFIT_SUM_8(32)
#define REFIT_NAMES_96 REFIT_NAMES_80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define REFIT_SUMS_96 REFIT_SUMS_80, REFIT_SUM_8(40)
#define REFIT_NAMES_112 REFIT_NAMES_96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define REFIT_SUMS_112 REFIT_SUMS_96, REFIT_SUM_8(48)
#define REFIT_NAMES_128 REFIT_NAMES_112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define REFIT_SUMS_128 REFIT_SUMS_112, REFIT_SUM_8(56)
#define REFIT_NAMES_144 REFIT_NAMES_128 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define REFIT_SUMS_144 REFIT_SUMS_128, REFIT_SUM_8(64)
#define REFIT_NAMES_160 REFIT_NAMES_144 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define REFIT_SUMS_160 REFIT_SUMS_144, REFIT_SUM_8(72)
#define REFIT_NAMES_176 REFIT_NAMES_160 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define REFIT_SUMS_176 REFIT_SUMS_160, REFIT_SUM_8(80)
#define REFIT_NAMES_192 REFIT_NAMES_176 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define REFIT_SUMS_192 REFIT_SUMS_176, REFIT_SUM_8(88)
#define REFIT_NAMES_208 REFIT_NAMES_192 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define REFIT_SUMS_208 REFIT_SUMS_192, REFIT_SUM_8(96)
#define REFIT_NAMES_224 REFIT_NAMES_208 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define REFIT_SUMS_224 REFIT_SUMS_208, REFIT_SUM_8(104)
#define REFIT_NAMES_240 REFIT_NAMES_224 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define REFIT_SUMS_240 REFIT_SUMS_224, REFIT_SUM_8(112)
#define REFIT_NAMES_256 REFIT_NAMES_240 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define REFIT_SUMS_256 REFIT_SUMS_240, REFIT_SUM_8(120)
#define REFIT_WGMMA(N, A, B)                                                                               \
  if constexpr (N == Columns) {                                                                            \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." REFIT_ELEMENT_PTX "." REFIT_ELEMENT_PTX \
                 " {" REFIT_NAMES_##N "}, %" #A ", %" #B ", 1, 1, 1, 0, 0;"                                \
                 : REFIT_SUMS_##N                                                                          \
                 : "l"(a), "l"(b));                                                                        \
    return;                                                                                                \
  }

// d += a b^T; a [64, 16], b [Columns, 16], both described in shared memory. Columns: 8, 24, or a multiple of 16 up to
// 256. (Sums that begin as undefined registers would count as live before their first use: begin with zeros.)
template <int Columns>
__device__ __forceinline__ void wgmma(WgmmaSums<Columns>& d, uint64_t a, uint64_t b) {
  REFIT_WGMMA(8, 4, 5)
  REFIT_WGMMA(16, 8, 9)
  REFIT_WGMMA(24, 12, 13)
  REFIT_WGMMA(32, 16, 17)
  REFIT_WGMMA(48, 24, 25)
  REFIT_WGMMA(64, 32, 33)
  REFIT_WGMMA(80, 40, 41)
  REFIT_WGMMA(96, 48, 49)
  REFIT_WGMMA(112, 56, 57)
  REFIT_WGMMA(128, 64, 65)
  REFIT_WGMMA(144, 72, 73)
  REFIT_WGMMA(160, 80, 81)
  REFIT_WGMMA(176, 88, 89)
  REFIT_WGMMA(192, 96, 97)
  REFIT_WGMMA(208, 104, 105)
  REFIT_WGMMA(224, 112, 113)
  REFIT_WGMMA(240, 120, 121)
  REFIT_WGMMA(256, 128, 129)
}
#undef REFIT_WGMMA

// Keeps the compiler from moving work with these registers to the other side of this place. A wgmma_wait does not: it
// names no registers.
template <int Count>
__device__ __forceinline__ void pin_registers(float (&d)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// --- For attention, whose sums often begin anew: the first product of a sum replaces d. N is 64 or 128.

#define REFIT_WGMMA_ONTO(N, A, B, ADD)                                                                           \
  "{\n"                                                                                                          \
  ".reg .pred add;\n"                                                                                            \
  "setp.ne.b32 add, %" #ADD                                                                                      \
  ", 0;\n"                                                                                                       \
  "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." REFIT_ELEMENT_PTX "." REFIT_ELEMENT_PTX " {" REFIT_NAMES_##N \
      "}, " A ", %" #B ", add, 1, 1"

// d = a b^T, plus d if `add` is not 0. a [64, 16], b [N, 16], both described in shared memory.
template <int N>
__device__ __forceinline__ void wgmma_onto(float (&d)[N / 2], uint64_t a, uint64_t b, int add) {
  static_assert(N == 64 || N == 128);
  if constexpr (N == 64) {
    asm volatile(REFIT_WGMMA_ONTO(64, "%32", 33, 34) ", 0, 0;\n}" : REFIT_SUMS_64 : "l"(a), "l"(b), "r"(add));
  } else {
    asm volatile(REFIT_WGMMA_ONTO(128, "%64", 65, 66) ", 0, 0;\n}" : REFIT_SUMS_128 : "l"(a), "l"(b), "r"(add));
  }
}

// d = a b, plus d if `add` is not 0. a [64, 16] in the registers from a[4 Step] on: pairs of Elements along k as mma
// takes them (gemm_mma.cuh), rows 16 w ... of warp w. b [16, N]: a transposed_descriptor.
template <int N, int Step, int Count>
__device__ __forceinline__ void wgmma_transposed(float (&d)[N / 2], const uint32_t (&a)[Count], uint64_t b, int add) {
  static_assert((N == 64 || N == 128) && 4 * Step + 4 <= Count);
  const uint32_t a0 = a[4 * Step], a1 = a[4 * Step + 1], a2 = a[4 * Step + 2], a3 = a[4 * Step + 3];
  if constexpr (N == 64) {
    asm volatile(REFIT_WGMMA_ONTO(64, "{%32, %33, %34, %35}", 36, 37) ", 1;\n}"
                 : REFIT_SUMS_64
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(add));
  } else {
    asm volatile(REFIT_WGMMA_ONTO(128, "{%64, %65, %66, %67}", 68, 69) ", 1;\n}"
                 : REFIT_SUMS_128
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(add));
  }
}
#undef REFIT_WGMMA_ONTO

}  // namespace refit::cuda
