// The memory of an engine's weights, for broadcasts that are received straight into it. Both functions throw
// std::runtime_error while the memory is released.
#pragma once
#include <cstdint>
#include <vector>

#include "core/write/places.h"
#include "cuda/group/group_gpu.h"

namespace refit::cuda {

// Runs find_places of core/write/places.h; offsets count from the rank's first parameter in memory and are the same in
// all sets of weights.
std::vector<uint64_t> places_in(const GroupHost& host, const std::vector<GroupPart>& parts,
                                const std::vector<Tensor>& tensors, const std::vector<Rect>& rects, int set);

// For each of the tensor-parallel ranks: the memory of each part in a set of weights; its offset is such a place.
// Throws std::invalid_argument if any of it is not parameters.
std::vector<std::vector<GroupSpan>> spans_in(const GroupHost& host, const std::vector<int>& ranks,
                                             const std::vector<GroupPart>& parts, int set);

}  // namespace refit::cuda
