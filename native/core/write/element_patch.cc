#include "core/write/element_patch.h"

#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>

namespace refit {
namespace {

template <typename T>
T load(const uint8_t* data, uint64_t index) {
  T value;
  std::memcpy(&value, data + index * sizeof(T), sizeof(T));
  return value;
}

// Calls each(index of the value, position) until it returns false. Positions from invalid gaps may wrap around.
template <typename Each>
void walk(const ElementPatch& patch, Each&& each) {
  const auto gaps = [&](auto type) {
    uint64_t position = ~uint64_t{0};
    for (uint64_t i = 0; i < patch.count; i++) {
      position += uint64_t{load<decltype(type)>(patch.positions, i)} + 1;
      if (!each(i, position)) return;
    }
  };
  switch (patch.encoding) {
    case Positions::kInt32:
      for (uint64_t i = 0; i < patch.count; i++) {
        // A negative position becomes a very large one, which the check refuses.
        if (!each(i, static_cast<uint64_t>(int64_t{load<int32_t>(patch.positions, i)}))) return;
      }
      return;
    case Positions::kRange:
      for (uint64_t i = 0; i < patch.count; i++) {
        if (!each(i, patch.first + i)) return;
      }
      return;
    case Positions::kGap16:
      return gaps(uint16_t{});
    case Positions::kGap32:
      return gaps(uint32_t{});
    case Positions::kGap64:
      return gaps(uint64_t{});
  }
}

uint64_t bytes_each(Positions encoding) {
  switch (encoding) {
    case Positions::kRange:
      return 0;
    case Positions::kGap16:
      return 2;
    case Positions::kGap64:
      return 8;
    default:
      return 4;
  }
}

template <DType kType>
float as_float(const uint8_t* values, uint64_t i) {
  return std::bit_cast<float>(float_bits<kType>(load<Bits<kType>>(values, i)));
}

float as_float(const uint8_t* values, uint64_t i, DType dtype) {
  float value = 0;
  with_dtype(dtype, [&]<DType kType>() { value = as_float<kType>(values, i); });
  return value;
}

template <typename T>
uint64_t apply(const ElementPatch& patch, uint64_t first, uint64_t count, DType dtype, uint8_t* block) {
  uint64_t changed = 0;
  walk(patch, [&](uint64_t i, uint64_t position) {
    const uint64_t at = position - first;
    if (at >= count) return true;
    const T before = load<T>(block, at);
    T after;
    if (patch.is_xor) {
      after = static_cast<T>(before ^ load<T>(patch.values, i));
    } else if (patch.dtype == dtype) {
      after = load<T>(patch.values, i);
    } else {
      after = static_cast<T>(from_float(dtype, as_float(patch.values, i, patch.dtype)));
    }
    changed += after != before;
    std::memcpy(block + at * sizeof(T), &after, sizeof(T));
    return true;
  });
  return changed;
}

}  // namespace

void check_patches(const std::vector<ElementPatch>& patches, uint64_t elements, DType dtype) {
  std::vector<uint64_t> seen((elements + 63) / 64);
  for (const ElementPatch& patch : patches) {
    if (patch.is_xor && patch.dtype != dtype) {
      throw std::invalid_argument(
          "its values change the bits of another dtype than the engine's: send what they become");
    }
    if (patch.position_bytes != patch.count * bytes_each(patch.encoding)) {
      throw std::invalid_argument("it has " + std::to_string(patch.position_bytes) + " bytes of positions for " +
                                  std::to_string(patch.count) + " values");
    }
    uint64_t bad = 0;
    bool twice = false, outside = false;
    walk(patch, [&](uint64_t, uint64_t position) {
      bad = position;
      outside = position >= elements;
      if (outside) return false;
      uint64_t& word = seen[position / 64];
      const uint64_t bit = uint64_t{1} << (position % 64);
      twice = (word & bit) != 0;
      word |= bit;
      return !twice;
    });
    if (outside) {
      throw std::invalid_argument("position " + std::to_string(static_cast<int64_t>(bad)) + " lies outside of its " +
                                  std::to_string(elements) + " elements");
    }
    if (twice) throw std::invalid_argument("position " + std::to_string(bad) + " comes twice");
  }
}

uint64_t apply_patch(const ElementPatch& patch, uint64_t first, uint64_t count, DType dtype, uint8_t* block) {
  return dtype == DType::kFloat32 ? apply<uint32_t>(patch, first, count, dtype, block)
                                  : apply<uint16_t>(patch, first, count, dtype, block);
}

uint64_t torch_hash(const uint8_t* data, uint64_t count, DType dtype) {
  uint64_t hash = 0;
  with_dtype(dtype, [&]<DType kType>() {
    for (uint64_t i = 0; i < count; i++) hash ^= std::bit_cast<uint64_t>(static_cast<double>(as_float<kType>(data, i)));
  });
  return hash;
}

uint64_t torch_hash(const uint8_t* data, uint64_t count) {
  uint8_t hash = 0;
  for (uint64_t i = 0; i < count; i++) hash ^= data[i];
  return hash;
}

}  // namespace refit
