// The weights of an engine's ranks as broadcasts are received into them. Both functions throw std::runtime_error while
// their memory is released.
#pragma once
#include <cstdint>
#include <vector>

#include "core/write/places.h"
#include "cuda/group/group_gpu.h"

namespace refit::cuda {

// find_places of core/places.h; a rank's weights begin with the parameter that lies first.
std::vector<uint64_t> places_in(const GroupHost& host, const std::vector<GroupPart>& parts,
                                const std::vector<Tensor>& tensors, const std::vector<Rect>& rects);

// For each of the tensor-parallel ranks the memory of each part, whose offset is such a place. Throws
// std::invalid_argument where not all of it is parameters.
std::vector<std::vector<GroupSpan>> spans_in(const GroupHost& host, const std::vector<int>& ranks,
                                             const std::vector<GroupPart>& parts);

}  // namespace refit::cuda
