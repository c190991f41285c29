// The formats that weights are stored, sent and held in, and their conversions. A new format is an enumerator, a row of
// kFormats and a branch of float_bits; if engines hold it, one of element_from_float_bits too. src/native/dtypes.ts has
// the same formats in the same order; a test compares them. Device code includes this file too.
#pragma once
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "core/host_device.h"

namespace refit {

enum class DType : uint8_t { kBFloat16, kFloat16, kFloat32 };

struct Format {
  DType dtype;
  const char* name;
  size_t bytes;
  // Engines hold parameters in it. Every format converts to each of these.
  bool held;
};

constexpr std::array kFormats{
    Format{DType::kBFloat16, "bfloat16", 2, true},
    Format{DType::kFloat16, "float16", 2, true},
    Format{DType::kFloat32, "float32", 4, true},
};
constexpr size_t kDTypes = kFormats.size();

constexpr const Format& format_of(DType t) { return kFormats[static_cast<size_t>(t)]; }
constexpr size_t size_of(DType t) { return format_of(t).bytes; }
constexpr const char* name_of(DType t) { return format_of(t).name; }

static_assert(
    [] {
      for (size_t i = 0; i < kDTypes; i++) {
        if (static_cast<size_t>(kFormats[i].dtype) != i) return false;
      }
      return true;
    }(),
    "rows are in the order of DType");

// An unsigned integer of the size of an element.
template <DType kType>
using Bits =
    std::conditional_t<size_of(kType) == 1, uint8_t, std::conditional_t<size_of(kType) == 2, uint16_t, uint32_t>>;

// Calls use.operator()<kType>() with the dtype as a constant.
template <typename Use>
void with_dtype(DType t, Use&& use) {
  [&]<size_t... kAt>(std::index_sequence<kAt...>) {
    ((static_cast<size_t>(t) == kAt ? use.template operator()<static_cast<DType>(kAt)>() : void()), ...);
  }
  (std::make_index_sequence<kDTypes>());
}

// IEEE 754 binary16, subnormals included; NaN keeps its payload. It has no branch, so that loops over it vectorise.
REFIT_HOST_DEVICE inline uint32_t fp16_to_float_bits(uint32_t h) {
  const uint32_t magnitude = (h & 0x7fffu) << 13;
  // A subnormal m * 2^-24: put m under the exponent of 2^-14 and take the hidden one away again. This is exact, and no
  // subnormal reaches the FPU, where it would be slow.
  const float hidden = __builtin_bit_cast(float, 113u << 23);
  const float subnormal = __builtin_bit_cast(float, magnitude + (113u << 23)) - hidden;
  uint32_t bits = (h & 0x7c00u) == 0 ? __builtin_bit_cast(uint32_t, subnormal) : magnitude + (112u << 23);
  bits = (h & 0x7c00u) == 0x7c00u ? (magnitude | 0x7f800000u) : bits;
  return bits | (h & 0x8000u) << 16;
}

// The bits of the float with the value of an element.
template <DType kType>
REFIT_HOST_DEVICE inline uint32_t float_bits(uint32_t element) {
  if constexpr (kType == DType::kBFloat16) {
    return element << 16;
  } else if constexpr (kType == DType::kFloat16) {
    return fp16_to_float_bits(element);
  } else {
    static_assert(kType == DType::kFloat32);
    return element;
  }
}

// Round to nearest even; NaN stays NaN (quieted).
REFIT_HOST_DEVICE inline uint32_t float_bits_to_bf16(uint32_t u) {
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return (u & 0x7fffffffu) > 0x7f800000u ? (u >> 16) | 0x40u : rounded;
}

// Round to nearest even, subnormals included; from 65,520 on it is infinity, as in IEEE 754. NaN stays NaN (quieted).
// It has no branch, so that loops over it vectorise.
REFIT_HOST_DEVICE inline uint32_t float_bits_to_fp16(uint32_t u) {
  const uint32_t magnitude = u & 0x7fffffffu;
  const uint32_t rounded = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t normal = rounded < 0x7c00u ? rounded : 0x7c00u;
  // The last bit of a float of [0.5, 1) is that of fp16's subnormals, so the addition rounds to it.
  const float sum = __builtin_bit_cast(float, magnitude) + 0.5f;
  uint32_t bits = magnitude < (113u << 23) ? __builtin_bit_cast(uint32_t, sum) - (126u << 23) : normal;
  bits = magnitude > 0x7f800000u ? 0x7e00u | ((magnitude >> 13) & 0x3ffu) : bits;
  return bits | ((u >> 16) & 0x8000u);
}

// The bits of the element of a dtype that is nearest to a float's value.
template <DType kType>
REFIT_HOST_DEVICE inline uint32_t element_from_float_bits(uint32_t u) {
  if constexpr (kType == DType::kBFloat16) {
    return float_bits_to_bf16(u);
  } else if constexpr (kType == DType::kFloat16) {
    return float_bits_to_fp16(u);
  } else {
    static_assert(kType == DType::kFloat32);
    return u;
  }
}

inline float bf16_to_float(uint16_t b) { return std::bit_cast<float>(float_bits<DType::kBFloat16>(b)); }

inline uint16_t float_to_bf16(float f) { return static_cast<uint16_t>(float_bits_to_bf16(std::bit_cast<uint32_t>(f))); }

inline float round_bf16(float f) { return bf16_to_float(float_to_bf16(f)); }

// The value of an element.
inline float to_float(DType t, uint32_t element) {
  uint32_t bits = 0;
  with_dtype(t, [&]<DType kType>() { bits = float_bits<kType>(element); });
  return std::bit_cast<float>(bits);
}

// The bits of the element that is nearest to a value.
inline uint32_t from_float(DType t, float value) {
  uint32_t bits = 0;
  with_dtype(t, [&]<DType kType>() { bits = element_from_float_bits<kType>(std::bit_cast<uint32_t>(value)); });
  return bits;
}

// The bits of an element in another dtype; the same dtype keeps them.
inline uint32_t convert_bits(DType from, DType to, uint32_t element) {
  return from == to ? element : from_float(to, to_float(from, element));
}

// The value that an element keeps.
inline float round_to(DType t, float value) { return to_float(t, from_float(t, value)); }

}  // namespace refit
