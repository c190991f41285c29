// The instructions of the matrix kernels: mma.sync for Elements, ldmatrix, cp.async, and streaming loads (PTX ISA,
// "Warp-level matrix instructions"; sm_80 and later).
#pragma once
#include <cstdint>

#include "cuda/device/types.h"

namespace refit::cuda {

// d += a b with a [16, 16], b [16, 8]. Thread 4 g + t holds, where a pair is two adjacent elements along k:
//   a: pairs (row g, k 2t), (row g + 8, k 2t), (row g, k 2t + 8), (row g + 8, k 2t + 8)
//   b: pairs (k 2t, column g), (k 2t + 8, column g)
//   d: (row g, columns 2t, 2t + 1), (row g + 8, the same)
__device__ __forceinline__ void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                    uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." REFIT_ELEMENT_PTX "." REFIT_ELEMENT_PTX
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Loads four 8 x 8 matrices; lane l passes the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Copies 16 bytes to shared memory without registers: the first `bytes` of them come from `from`, the rest are zero.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void commit_async() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `Pending` of this thread's groups are pending.
template <int Pending>
__device__ __forceinline__ void wait_async() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// Loads 16 bytes by the instruction `load`. Returns zeros if `there` is false, and then does not read `p`. Volatile:
// many loads must be in flight, and the compiler would move them to their use.
#define REFIT_LOAD_16(name, load, ...)                                  \
  __device__ __forceinline__ uint4 name(const Element* p, bool there) { \
    uint4 v;                                                            \
    asm volatile(                                                       \
        "{\n"                                                           \
        ".reg .pred p;\n"                                               \
        "setp.ne.s32 p, %5, 0;\n"                                       \
        "mov.b32 %0, 0;\n"                                              \
        "mov.b32 %1, 0;\n"                                              \
        "mov.b32 %2, 0;\n"                                              \
        "mov.b32 %3, 0;\n"                                              \
        "@p " load                                                      \
        ".v4.b32 {%0, %1, %2, %3}, [%4];\n"                             \
        "}"                                                             \
        : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)                \
        : "l"(p), "r"(static_cast<int>(there))                          \
        : __VA_ARGS__);                                                 \
    return v;                                                           \
  }
// Bytes that are read once: past L1.
REFIT_LOAD_16(load_once, "ld.global.nc.L1::no_allocate.L2::128B")
// Bytes that other warps read, too.
REFIT_LOAD_16(load_kept, "ld.global.nc")
// Bytes that the kernel before may have written (early_launch.cuh).
REFIT_LOAD_16(load_fresh, "ld.global", "memory")
#undef REFIT_LOAD_16

__device__ __forceinline__ void put(Element* y, float v) { *y = to_element(v); }
__device__ __forceinline__ void put(float* y, float v) { *y = v; }
__device__ __forceinline__ void put_pair(Element* y, float a, float b) {
  *reinterpret_cast<Element2*>(y) = to_elements(a, b);
}
__device__ __forceinline__ void put_pair(float* y, float a, float b) {
  *reinterpret_cast<float2*>(y) = make_float2(a, b);
}

}  // namespace refit::cuda
