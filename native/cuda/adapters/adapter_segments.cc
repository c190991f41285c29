#include "cuda/adapters/adapter_segments.h"

#include <algorithm>

namespace refit::cuda {

bool uses_adapters(const StepBatch& batch) {
  return std::any_of(batch.adapters.begin(), batch.adapters.end(), [](int32_t slot) { return slot >= 0; });
}

std::vector<int32_t> token_slots(const StepBatch& batch) {
  std::vector<int32_t> slots(batch.tokens.size(), -1);
  for (int s = 0; s < batch.sequences(); ++s) {
    std::fill(slots.begin() + batch.seq_offsets[s], slots.begin() + batch.seq_offsets[s + 1], batch.adapter(s));
  }
  return slots;
}

SegmentList cut_segments(std::span<const int32_t> slots) {
  SegmentList out;
  std::vector<AdapterSegment> base;
  for (size_t begin = 0; begin < slots.size();) {
    size_t end = begin + 1;
    while (end < slots.size() && end - begin < kAdapterSegmentRows && slots[end] == slots[begin]) ++end;
    const AdapterSegment segment{slots[begin], static_cast<int32_t>(begin), static_cast<int32_t>(end - begin)};
    if (segment.slot < 0) {
      base.push_back(segment);
    } else {
      out.list.push_back(segment);
      out.counts.rows += segment.rows;
      out.counts.most_rows = std::max(out.counts.most_rows, segment.rows);
    }
    begin = end;
  }
  out.counts.count = static_cast<int>(out.list.size());
  out.counts.base_count = static_cast<int>(base.size());
  out.list.insert(out.list.end(), base.begin(), base.end());
  return out;
}

}  // namespace refit::cuda
