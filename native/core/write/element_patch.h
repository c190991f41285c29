// Changes of single elements of a tensor: their positions and new values. Positions in trainers' deltas are read in
// place, in every format that trainers write.
#pragma once
#include <cstdint>
#include <vector>

#include "core/dtype.h"

namespace refit {

// The format of the positions. The numbers are those of POSITIONS in src/native/deltas.ts.
enum class Positions : uint8_t {
  kInt32 = 0,  // int32 each, little-endian, in any order
  kRange = 1,  // no list: the positions are first, first + 1, ...
  kGap16 = 2,  // uint16: the distance from the previous position (at first: from -1), minus 1
  kGap32 = 3,
  kGap64 = 4,
};

struct ElementPatch {
  Positions encoding = Positions::kInt32;
  const uint8_t* positions = nullptr;
  uint64_t position_bytes = 0;
  uint64_t first = 0;  // the first position, for kRange
  const uint8_t* values = nullptr;
  DType dtype = DType::kBFloat16;  // of the values
  uint64_t count = 0;              // number of elements
  bool is_xor = false;             // the new bits are the old bits XOR the value
};

// Checks that every position is inside a tensor of `elements` elements, and that none occurs twice, in one patch or in
// two. `dtype` is the dtype of the tensor in the engine; an XOR patch needs the same dtype. Throws
// std::invalid_argument, std::bad_alloc.
void check_patches(const std::vector<ElementPatch>& patches, uint64_t elements, DType dtype);

// Changes the elements of [first, first + count) that a checked patch contains. `block` holds them in `dtype`. Values
// of the same dtype are stored bit by bit, others are rounded to nearest even. Returns how many elements have changed
// their bits.
uint64_t apply_patch(const ElementPatch& patch, uint64_t first, uint64_t count, DType dtype, uint8_t* block);

// The result of torch.hash_tensor (mode 0): the XOR of all elements, each as a float64.
uint64_t torch_hash(const uint8_t* data, uint64_t count, DType dtype);
// The same for uint8 elements: the XOR of each as a uint64.
uint64_t torch_hash(const uint8_t* data, uint64_t count);

}  // namespace refit
