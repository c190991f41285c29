#include "transport/ipc/ipc_plan.h"

#include <string_view>
#include <unordered_map>
#include <unordered_set>

namespace refit::ipc {
namespace {

template <typename T>
void append(std::string& out, const T* items, size_t count) {
  out.append(reinterpret_cast<const char*>(items), count * sizeof(T));
}

uint64_t end_of(const Tensor& tensor) { return tensor.at(tensor.rows - 1, tensor.cols - 1) + size_of(tensor.dtype); }

}  // namespace

std::string segment_key(const Segment& segment) {
  std::string key;
  if (!segment.handle.empty()) {
    key = "handle";
    append(key, segment.handle.data(), segment.handle.size());
    return key;
  }
  key = segment.fds.empty() ? "fabric" : "blocks";
  append(key, &segment.block_bytes, 1);
  append(key, segment.fds.data(), segment.fds.size());
  append(key, segment.fabric.data(), segment.fabric.size());
  return key;
}

IpcPlan plan_segments(const WriteJob& job, int ranks) {
  IpcPlan plan;
  plan.ranks.resize(static_cast<size_t>(ranks));
  if (job.segments.empty()) return plan;
  const size_t count = job.segments.size();
  std::vector<int> same(count);  // the first segment with the same memory
  std::unordered_map<std::string, int> first;
  for (size_t s = 0; s < count; s++) {
    same[s] = first.emplace(segment_key(job.segments[s]), static_cast<int>(s)).first->second;
  }
  std::vector<std::vector<int>> place(plan.ranks.size(), std::vector<int>(count, -1));
  std::vector<uint8_t> used(count);
  std::unordered_set<std::string_view> events;
  for (size_t i = 0; i < job.rects.size(); i++) {
    const Rect& rect = job.rects[i];
    const Tensor& tensor = job.tensors[rect.tensor];
    const int named = job.sources[tensor.source].segment;
    if (named < 0 || rect.rows == 0 || rect.cols == 0) continue;
    std::vector<PlannedSegment>& planned = plan.ranks[rect.rank];
    int& at = place[rect.rank][same[named]];
    if (at < 0) {
      at = static_cast<int>(planned.size());
      planned.emplace_back();
      planned.back().segment = same[named];
      planned.back().tensor = rect.tensor;
    }
    PlannedSegment& segment = planned[at];
    segment.rects.push_back(i);
    if (segment.ends.empty() || segment.ends.back().first != rect.tensor) {
      segment.ends.emplace_back(rect.tensor, end_of(tensor));
    }
    segment.bytes += static_cast<uint64_t>(rect.rows * rect.cols) * size_of(tensor.dtype);
    if (!job.segments[named].keep.empty()) segment.keep = job.segments[named].keep;
    if (used[named] != 0) continue;
    used[named] = 1;
    const std::vector<uint8_t>& handles = job.segments[named].events;
    for (size_t e = 0; e < handles.size(); e += Segment::kHandleBytes) {
      const uint8_t* handle = handles.data() + e;
      if (!events.emplace(reinterpret_cast<const char*>(handle), Segment::kHandleBytes).second) continue;
      plan.events.push_back({handle, rect.tensor, rect.rank});
    }
  }
  return plan;
}

}  // namespace refit::ipc
