// Conversions between dtypes: every bit pattern of 16 bits, and floats around the ties of their rounding.
#include <bit>
#include <cstring>
#include <vector>

#include "core/write/write_convert.h"
#include "test/check.h"
#include "test/random.h"

using namespace refit;
using test::Random;

namespace {

void conversions_agree_with_dtype_h_on_every_bit_pattern() {
  std::vector<uint8_t> src((size_t{1} << 16) * 4 + 1);
  std::vector<uint32_t> dst(size_t{1} << 16);
  for (const DType from : {DType::kBFloat16, DType::kFloat16}) {
    for (const int misaligned : {0, 1}) {
      for (uint32_t i = 0; i < 65536; i++) std::memcpy(&src[misaligned + 2 * i], &i, 2);
      for (const DType to : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
        converter(from, to)(src.data() + misaligned, reinterpret_cast<uint8_t*>(dst.data()), 65536);
        for (uint32_t i = 0; i < 65536; i++) {
          const uint32_t got = to == DType::kFloat32 ? dst[i] : reinterpret_cast<const uint16_t*>(dst.data())[i];
          CHECKF(got == convert_bits(from, to, i), "from %d to %d: %04x gave %08x", static_cast<int>(from),
                 static_cast<int>(to), i, got);
        }
      }
    }
  }
  // The compiler's own binary16 is the reference of fp16, except that it quiets NaN.
  for (uint32_t i = 0; i < 65536; i++) {
    const auto wanted = static_cast<float>(std::bit_cast<_Float16>(static_cast<uint16_t>(i)));
    const uint32_t bits = std::bit_cast<uint32_t>(to_float(DType::kFloat16, i));
    const bool nan = wanted != wanted;
    CHECKF((nan ? bits | 0x400000u : bits) == std::bit_cast<uint32_t>(wanted), "%04x gave %08x", i, bits);
  }
}

// Every sign, exponent and kept bit of a float, with the mantissas around ties of elements that keep all but `cut`
// bits.
std::vector<uint32_t> floats_around_ties(int cut) {
  std::vector<uint32_t> bits;
  const uint32_t half = 1u << (cut - 1);
  for (uint64_t high = 0; high < uint64_t{1} << 32; high += uint64_t{2} * half) {
    for (const uint32_t low : {0u, 1u, half - 1, half, half + 1, 2 * half - 1}) {
      bits.push_back(static_cast<uint32_t>(high) | low);
    }
  }
  return bits;
}

void floats_are_rounded_to_the_nearest_element(DType to, int cut) {
  const std::vector<uint32_t> bits = floats_around_ties(cut);
  std::vector<uint16_t> out(bits.size());
  for (const size_t tail : {size_t{0}, size_t{1}, size_t{7}, size_t{31}}) {
    converter(DType::kFloat32, to)(reinterpret_cast<const uint8_t*>(bits.data() + tail),
                                   reinterpret_cast<uint8_t*>(out.data() + tail),
                                   static_cast<int64_t>(bits.size() - tail));
    size_t wrong = 0;
    for (size_t i = tail; i < bits.size(); i++) wrong += out[i] != from_float(to, std::bit_cast<float>(bits[i]));
    CHECKF(wrong == 0, "%zu of %zu from place %zu on differ", wrong, bits.size(), tail);
  }
}

// The compiler's own binary16 is the reference, except for the payload of NaN.
void fp16_is_rounded_as_the_compiler_rounds() {
  const auto wrong = [](uint32_t bits) {
    const auto value = std::bit_cast<float>(bits);
    const uint32_t got = from_float(DType::kFloat16, value);
    if (value != value) return (got & 0x7e00) != 0x7e00 || got >> 15 != bits >> 31;
    return got != std::bit_cast<uint16_t>(static_cast<_Float16>(value));
  };
  // 13 bits are cut from normal numbers; subnormal ones lose up to 11 more, which random bits cover.
  for (const uint32_t bits : floats_around_ties(13)) CHECKF(!wrong(bits), "%08x", bits);
  Random random(11);
  for (int i = 0; i < 1 << 20; i++) {
    const auto magnitude = static_cast<uint32_t>(random.below(113 << 23)), sign = i % 2 == 0 ? 0u : 1u << 31;
    CHECKF(!wrong(magnitude | sign), "%08x", magnitude | sign);
  }
  // The ties of all subnormal numbers and those around the largest number.
  for (int i = 0; i <= 1024; i++) {
    const uint32_t tie = std::bit_cast<uint32_t>((static_cast<float>(i) + 0.5f) * 0x1p-24f);
    for (const uint32_t bits : {tie - 1, tie, tie + 1}) CHECKF(!wrong(bits), "%08x", bits);
  }
  CHECK(from_float(DType::kFloat16, 65504.0f) == 0x7bff && from_float(DType::kFloat16, 65519.99f) == 0x7bff);
  CHECK(from_float(DType::kFloat16, 65520.0f) == 0x7c00 && from_float(DType::kFloat16, -1e30f) == 0xfc00);
  // Widening and rounding gives every element back.
  for (uint32_t i = 0; i < 65536; i++) {
    const float value = to_float(DType::kFloat16, i);
    CHECKF(from_float(DType::kFloat16, value) == (value != value ? i | 0x200 : i), "%04x", i);
  }
}

}  // namespace

int main() {
  conversions_agree_with_dtype_h_on_every_bit_pattern();
  floats_are_rounded_to_the_nearest_element(DType::kBFloat16, 16);
  floats_are_rounded_to_the_nearest_element(DType::kFloat16, 13);
  fp16_is_rounded_as_the_compiler_rounds();
  return refit::test::finish("convert_test");
}
