#include "core/write/places.h"

#include <algorithm>
#include <tuple>

namespace refit {
namespace {

// The bytes of a source from the first to the last one that a rectangle needs.
struct Run {
  uint64_t from = 0, end = 0;
  uint64_t to = kNoPlace;  // offset in the weights, if they have the same order there
};

Run run_of(const Tensor& tensor, const Rect& rect, const ParamPlace& param) {
  const uint64_t element = size_of(tensor.dtype);
  const uint64_t width = static_cast<uint64_t>(rect.cols) * element;
  Run run;
  run.from = tensor.at(rect.src_row, rect.src_col);
  run.end = tensor.at(rect.src_row + rect.rows - 1, rect.src_col + rect.cols - 1) + element;
  const bool in_order = (rect.cols == 1 || tensor.col_bytes == element) &&
                        (rect.rows == 1 || (tensor.row_bytes == width && param.row_bytes == width));
  if (param.bytes > 0 && tensor.dtype == param.dtype && in_order) {
    run.to = param.offset + static_cast<uint64_t>(rect.dst_row) * param.row_bytes +
             static_cast<uint64_t>(rect.dst_col) * element;
  }
  return run;
}

// The runs of one rank.
class RankRuns {
 public:
  void add(const Run& run) { runs_.push_back(run); }

  void sort() {
    std::sort(runs_.begin(), runs_.end(),
              [](const Run& a, const Run& b) { return std::tie(a.from, a.end) < std::tie(b.from, b.end); });
    uint64_t end = 0;
    for (const Run& run : runs_) ends_.push_back(end = std::max(end, run.end));
  }

  uint64_t place_of(const GroupPart& part) const {
    const uint64_t begin = part.offset, end = part.offset + part.bytes;
    uint64_t place = kNoPlace;
    uint64_t at = begin;  // all bytes up to here are adjacent
    // No run before this one reaches into the part.
    for (auto i = static_cast<size_t>(std::upper_bound(ends_.begin(), ends_.end(), begin) - ends_.begin());
         i < runs_.size() && runs_[i].from < end; i++) {
      const Run& run = runs_[i];
      if (run.end <= begin) continue;
      const uint64_t from = std::max(run.from, begin);
      if (run.to == kNoPlace || from != at) return kNoPlace;
      const uint64_t to = run.to + (from - run.from);
      if (place == kNoPlace) place = to;
      if (to != place + (at - begin)) return kNoPlace;
      at = std::min(run.end, end);
    }
    return at == end ? place : kNoPlace;
  }

 private:
  std::vector<Run> runs_;
  std::vector<uint64_t> ends_;  // for each run, the largest end of it and all before it
};

}  // namespace

std::vector<uint64_t> find_places(const std::vector<GroupPart>& parts, const std::vector<Tensor>& tensors,
                                  const std::vector<Rect>& rects, const std::vector<std::vector<ParamPlace>>& params) {
  std::vector<RankRuns> ranks(params.size());
  for (const Rect& rect : rects) {
    if (rect.rows == 0 || rect.cols == 0) continue;
    const auto rank = static_cast<size_t>(rect.rank);
    ranks[rank].add(
        run_of(tensors[static_cast<size_t>(rect.tensor)], rect, params[rank][static_cast<size_t>(rect.param)]));
  }
  for (RankRuns& rank : ranks) rank.sort();
  std::vector<uint64_t> places;
  places.reserve(parts.size());
  for (const GroupPart& part : parts) {
    uint64_t place = part.bytes == 0 || ranks.empty() ? 0 : ranks[0].place_of(part);
    for (const RankRuns& rank : ranks) {
      if (part.bytes > 0 && rank.place_of(part) != place) place = kNoPlace;
    }
    places.push_back(place);
  }
  return places;
}

bool are_weights(const std::vector<ParamPlace>& params, uint64_t offset, uint64_t bytes) {
  auto param = std::upper_bound(params.begin(), params.end(), offset,
                                [](uint64_t at, const ParamPlace& p) { return at < p.offset; });
  if (param != params.begin()) --param;
  uint64_t at = offset;
  for (; bytes > 0; ++param) {
    if (param == params.end() || param->offset > at) return false;
    const uint64_t skipped = at - param->offset;
    if (skipped > param->bytes) return false;
    const uint64_t here = std::min(bytes, param->bytes - skipped);
    at += here;
    bytes -= here;
  }
  return true;
}

}  // namespace refit
