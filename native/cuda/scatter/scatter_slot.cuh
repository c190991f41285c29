// Device code of the scatter for one slot: loads of any alignment and conversion to Element.
#pragma once
#include "cuda/scatter/scatter_plan.h"

namespace refit::cuda {

template <DType kType>
constexpr int kSizeOf = static_cast<int>(size_of(kType));

// Each byte is read once, from a GPU, a peer or the host, so it bypasses L1.
__device__ __forceinline__ uint4 load_vector(uint64_t address) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}

__device__ __forceinline__ void store_vector(uint64_t address, uint4 v) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// Stays in L1: the adjacent thread reads half of it again.
__device__ __forceinline__ uint4 load_shared_vector(uint64_t address) {
  return __ldg(reinterpret_cast<const uint4*>(address));
}

// Bytes [shift, shift + 16) of the 32 in a and b; shift below 16.
__device__ __forceinline__ uint4 shifted(uint4 a, uint4 b, uint32_t shift) {
  uint32_t w0 = a.x, w1 = a.y, w2 = a.z, w3 = a.w, w4 = b.x, w5 = b.y;
  if (shift & 8) {
    w0 = a.z, w1 = a.w, w2 = b.x, w3 = b.y, w4 = b.z, w5 = b.w;
  }
  if (shift & 4) {
    w0 = w1, w1 = w2, w2 = w3, w3 = w4, w4 = w5;
  }
  const uint32_t bits = (shift & 3) * 8;
  return {__funnelshift_r(w0, w1, bits), __funnelshift_r(w1, w2, bits), __funnelshift_r(w2, w3, bits),
          __funnelshift_r(w3, w4, bits)};
}

// Single elements, at any address.
__device__ __forceinline__ uint32_t load_u16(uint64_t address) {
  if (address % 2 == 0) return __ldg(reinterpret_cast<const uint16_t*>(address));
  const auto* bytes = reinterpret_cast<const uint8_t*>(address);
  return __ldg(bytes) | static_cast<uint32_t>(__ldg(bytes + 1)) << 8;
}

__device__ __forceinline__ uint32_t load_u32(uint64_t address) {
  if (address % 4 == 0) return __ldg(reinterpret_cast<const uint32_t*>(address));
  return load_u16(address) | load_u16(address + 2) << 16;
}

template <DType kType>
__device__ __forceinline__ uint32_t converted(uint32_t bits) {
  if constexpr (kType == kElementType) return bits;
  return element_from_float_bits<kElementType>(float_bits<kType>(bits));
}

template <DType kType>
__device__ __forceinline__ uint32_t load_element(uint64_t address) {
  if constexpr (kSizeOf<kType> == 4) return converted<kType>(load_u32(address));
  return converted<kType>(load_u16(address));
}

template <DType kType>
__device__ __forceinline__ uint32_t pair(uint32_t low, uint32_t high) {
  return converted<kType>(low) | converted<kType>(high) << 16;
}

template <DType kType>
__device__ __forceinline__ uint32_t pair_of_word(uint32_t word) {
  if constexpr (kType == kElementType) return word;
  return pair<kType>(word & 0xffffu, word >> 16);
}

// Eight elements from `address` on, `stride` bytes apart.
template <DType kType>
__device__ __forceinline__ uint4 gather_slot(uint64_t address, int64_t stride) {
  uint32_t e[8];
#pragma unroll
  for (int i = 0; i < 8; i++) e[i] = load_element<kType>(address + i * stride);
  return {e[0] | e[1] << 16, e[2] | e[3] << 16, e[4] | e[5] << 16, e[6] | e[7] << 16};
}

// Eight adjacent elements from `address` on. Reads only bytes of [begin, end), because bytes around them may be
// unmapped.
template <DType kType>
__device__ __forceinline__ uint4 load_slot(uint64_t address, uint64_t begin, uint64_t end) {
  constexpr int kVectors = kSizeOf<kType> == 4 ? 2 : 1;
  const auto shift = static_cast<uint32_t>(address % 16);
  const uint64_t base = address - shift;
  uint4 v[kVectors];
  if (shift == 0) {
#pragma unroll
    for (int i = 0; i < kVectors; i++) v[i] = load_vector(base + 16 * i);
  } else if (base >= begin && base + 16 * (kVectors + 1) <= end) {
    uint4 raw[kVectors + 1];
#pragma unroll
    for (int i = 0; i <= kVectors; i++) raw[i] = load_shared_vector(base + 16 * i);
#pragma unroll
    for (int i = 0; i < kVectors; i++) v[i] = shifted(raw[i], raw[i + 1], shift);
  } else {
    return gather_slot<kType>(address, kSizeOf<kType>);
  }
  if constexpr (kSizeOf<kType> == 4) {
    return {pair<kType>(v[0].x, v[0].y), pair<kType>(v[0].z, v[0].w), pair<kType>(v[1].x, v[1].y),
            pair<kType>(v[1].z, v[1].w)};
  } else {
    return {pair_of_word<kType>(v[0].x), pair_of_word<kType>(v[0].y), pair_of_word<kType>(v[0].z),
            pair_of_word<kType>(v[0].w)};
  }
}

// Copies the part of a row that is in one slot of the target.
template <DType kType, bool kGathered>
__device__ __forceinline__ void copy_slot(const ScatterCopy& copy, uint32_t row, uint32_t slot) {
  const uint64_t src = copy.src + row * static_cast<uint64_t>(copy.src_row);
  const uint64_t dst = copy.dst + row * static_cast<uint64_t>(copy.dst_row);
  const auto [first, from, to] = slot_range(dst, copy.cols, slot);
  if (to - from == 8) {
    const uint64_t address = src + static_cast<uint64_t>(first * copy.src_col);
    const uint4 v = kGathered ? gather_slot<kType>(address, copy.src_col)
                              : load_slot<kType>(address, src, src + copy.cols * kSizeOf<kType>);
    store_vector(dst + static_cast<uint64_t>(first) * 2, v);
    return;
  }
  for (int64_t i = from; i < to; i++) {
    *reinterpret_cast<uint16_t*>(dst + static_cast<uint64_t>(i) * 2) =
        static_cast<uint16_t>(load_element<kType>(src + static_cast<uint64_t>(i * copy.src_col)));
  }
}

}  // namespace refit::cuda
