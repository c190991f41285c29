// Changes of single elements of a tensor: which ones, and what they become. The positions of trainers' deltas are read
// where they lie, in each of the ways in which they are written.
#pragma once
#include <cstdint>
#include <vector>

#include "core/dtype.h"

namespace refit {

// How the positions are written. The numbers are those of POSITIONS in src/native/deltas.ts.
enum class Positions : uint8_t {
  kInt32 = 0,  // int32 each, little-endian, in any order
  kRange = 1,  // none are: they follow `first` one by one
  kGap16 = 2,  // the distance from the one before (of the first: from -1), less 1, as uint16
  kGap32 = 3,
  kGap64 = 4,
};

struct ElementPatch {
  Positions encoding = Positions::kInt32;
  const uint8_t* positions = nullptr;
  uint64_t position_bytes = 0;
  uint64_t first = 0;  // of a range
  const uint8_t* values = nullptr;
  DType dtype = DType::kBFloat16;  // of the values
  uint64_t count = 0;              // of elements
  bool is_xor = false;             // the value is what changes the bits, not the new ones
};

// Every position lies inside a tensor of `elements`, and none comes twice, in one patch or in two. `dtype`: in which
// the tensor is held; a change by bits needs the same. Throws std::invalid_argument, std::bad_alloc.
void check_patches(const std::vector<ElementPatch>& patches, uint64_t elements, DType dtype);

// Changes those of the tensor's elements [first, first + count) that a checked patch has. `block` holds them in `dtype`
// (bf16 or fp32). Same dtype: the value's bits; else rounded to nearest even. Returns how many elements have other bits
// than before.
uint64_t apply_patch(const ElementPatch& patch, uint64_t first, uint64_t count, DType dtype, uint8_t* block);

// What torch.hash_tensor gives (its mode 0): each element as a float64, all of them by XOR.
uint64_t torch_hash(const uint8_t* data, uint64_t count, DType dtype);
// The same of uint8: each as a uint64.
uint64_t torch_hash(const uint8_t* data, uint64_t count);

}  // namespace refit
