// Computes the places of broadcast bytes in the weights, so they can be received there without a copy. It touches no
// memory.
#pragma once
#include <cstdint>
#include <vector>

#include "core/dtype.h"
#include "core/group.h"
#include "core/write/write.h"

namespace refit {

// A parameter in the weights of one rank, in bytes.
struct ParamPlace {
  uint64_t offset = 0;     // of its first element, from the start of the rank's weights
  uint64_t row_bytes = 0;  // rows follow each other without gaps
  uint64_t bytes = 0;      // 0: nothing is received there
  DType dtype = DType::kBFloat16;
};

constexpr uint64_t kNoPlace = UINT64_MAX;

// Returns an offset in the weights for each part (offset and bytes in the tensors' only source): a write would leave
// exactly the part's bytes there, in their order, on every rank. It is kNoPlace if there is no such offset: because of
// a gap, another order, an element of another dtype, a byte that is needed twice or (on one rank) not at all, or a row
// of a rectangle whose rows are not adjacent. A part of 0 bytes has offset 0. `params` has the parameters of each rank,
// by the rectangles' `param`. The job must have passed check_write.
std::vector<uint64_t> find_places(const std::vector<GroupPart>& parts, const std::vector<Tensor>& tensors,
                                  const std::vector<Rect>& rects, const std::vector<std::vector<ParamPlace>>& params);

// Returns true if all of these bytes belong to parameters. `params` are sorted by offset, then by size.
bool are_weights(const std::vector<ParamPlace>& params, uint64_t offset, uint64_t bytes);

}  // namespace refit
