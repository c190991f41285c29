#include "cuda/group/group_weights.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>

namespace refit::cuda {
namespace {

struct RankWeights {
  uint8_t* begin = nullptr;
  std::vector<ParamPlace> params;  // in the host's order
};

RankWeights weights_of(const std::vector<GroupSpan>& params) {
  RankWeights weights;
  for (const GroupSpan& param : params) {
    auto* const at = static_cast<uint8_t*>(param.data);
    if (weights.begin == nullptr || at < weights.begin) weights.begin = at;
  }
  for (const GroupSpan& param : params) {
    const auto offset = static_cast<uint64_t>(static_cast<uint8_t*>(param.data) - weights.begin);
    weights.params.push_back({offset, param.row_bytes, param.bytes, param.dtype});
  }
  return weights;
}

std::vector<GroupSpan> spans_of(RankWeights weights, const std::vector<GroupPart>& parts) {
  std::sort(weights.params.begin(), weights.params.end(), [](const ParamPlace& a, const ParamPlace& b) {
    return std::tie(a.offset, a.bytes) < std::tie(b.offset, b.bytes);
  });
  std::vector<GroupSpan> spans;
  for (const GroupPart& part : parts) {
    if (!are_weights(weights.params, part.offset, part.bytes)) {
      throw std::invalid_argument(std::to_string(part.bytes) + " bytes at " + std::to_string(part.offset) +
                                  " are not all weights: nothing can be received there");
    }
    spans.push_back({weights.begin + part.offset, part.bytes});
  }
  return spans;
}

}  // namespace

std::vector<uint64_t> places_in(const GroupHost& host, const std::vector<GroupPart>& parts,
                                const std::vector<Tensor>& tensors, const std::vector<Rect>& rects, int set) {
  std::vector<std::vector<ParamPlace>> params;
  for (int rank = 0; rank < host.ranks; rank++) params.push_back(weights_of(host.params(rank, set)).params);
  return find_places(parts, tensors, rects, params);
}

std::vector<std::vector<GroupSpan>> spans_in(const GroupHost& host, const std::vector<int>& ranks,
                                             const std::vector<GroupPart>& parts, int set) {
  std::vector<std::vector<GroupSpan>> spans;
  for (const int rank : ranks) spans.push_back(spans_of(weights_of(host.params(rank, set)), parts));
  return spans;
}

}  // namespace refit::cuda
