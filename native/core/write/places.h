// Computes where the bytes of broadcasts go in the weights, so that they can be received there without a copy. It
// touches no memory.
#pragma once
#include <cstdint>
#include <vector>

#include "core/dtype.h"
#include "core/group.h"
#include "core/write/write.h"

namespace refit {

// A parameter in the weights of one rank; bytes.
struct ParamPlace {
  uint64_t offset = 0;     // of its first element, from where the rank's weights begin
  uint64_t row_bytes = 0;  // rows follow each other without gaps
  uint64_t bytes = 0;
  DType dtype = DType::kBFloat16;
};

constexpr uint64_t kNoPlace = UINT64_MAX;

// For each part (offset and bytes in the tensors' one source): the offset in the weights, the same on every rank, at
// which a write would leave exactly the part's bytes in their order. kNoPlace where there is none: a gap, another
// order, an element of another dtype, a byte that is needed twice or (on one rank) not at all, a row of a rectangle
// whose rows are not adjacent. A part of 0 bytes is at 0. `params`: of each rank, by the rectangles' `param`. The job
// has passed check_write.
std::vector<uint64_t> find_places(const std::vector<GroupPart>& parts, const std::vector<Tensor>& tensors,
                                  const std::vector<Rect>& rects, const std::vector<std::vector<ParamPlace>>& params);

// Whether all of these bytes belong to parameters. `params` are sorted by offset, then by size.
bool are_weights(const std::vector<ParamPlace>& params, uint64_t offset, uint64_t bytes);

}  // namespace refit
