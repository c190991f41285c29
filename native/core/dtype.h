// Storage dtypes and their conversions. The numbers are those of DTYPES in src/native/addon.ts.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace refit {

enum class DType : uint8_t { kBFloat16 = 0, kFloat16 = 1, kFloat32 = 2 };

constexpr size_t size_of(DType t) { return t == DType::kFloat32 ? 4 : 2; }

constexpr const char* name_of(DType t) {
  return t == DType::kFloat32 ? "float32" : t == DType::kFloat16 ? "float16" : "bfloat16";
}

inline float bf16_to_float(uint16_t b) { return std::bit_cast<float>(static_cast<uint32_t>(b) << 16); }

// Round to nearest even; NaN stays NaN (quieted).
inline uint16_t float_to_bf16(float f) {
  const uint32_t u = std::bit_cast<uint32_t>(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((u >> 16) | 0x40u);
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

inline float round_bf16(float f) { return bf16_to_float(float_to_bf16(f)); }

// IEEE 754 binary16, subnormals included.
inline float fp16_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t exp = (h >> 10) & 0x1fu;
  const uint32_t man = h & 0x3ffu;
  if (exp == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | (man << 13));
  if (exp != 0) return std::bit_cast<float>(sign | ((exp + 112u) << 23) | (man << 13));
  const float f = static_cast<float>(man) * 0x1p-24f;
  return sign != 0 ? -f : f;
}

}  // namespace refit
