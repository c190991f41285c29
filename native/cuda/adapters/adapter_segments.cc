#include "cuda/adapters/adapter_segments.h"

#include <algorithm>
#include <bit>

namespace refit::cuda {

namespace {

// 1, 2, 3, 4, 6, 8, 12, ...: blocks of at most a third of the segments leave at once.
int rounded_segments(int count) {
  if (count <= 0) return 0;
  const auto power = static_cast<int>(std::bit_ceil(static_cast<unsigned>(count)));
  return power >= 4 && count <= power / 4 * 3 ? power / 4 * 3 : power;
}

}  // namespace

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

SegmentRoom segment_room(const AdapterSegments& counts) {
  if (counts.count == 0) return {};
  // At least 8 rows, which all kernels compute at a time. At least one base segment: a step of adapters alone and one
  // that has a row of the base model, too, share a graph.
  const int rows = std::max(8, static_cast<int>(std::bit_ceil(static_cast<unsigned>(counts.most_rows))));
  return {rounded_segments(counts.count), std::max(1, rounded_segments(counts.base_count)), rows};
}

SegmentList pad_segments(const SegmentList& cut, const SegmentRoom& room, int tokens) {
  constexpr AdapterSegment kPadding{0, 0, 0};
  SegmentList out;
  const auto base = cut.list.begin() + cut.counts.count;
  out.list.assign(cut.list.begin(), base);
  out.list.resize(static_cast<size_t>(room.segments), kPadding);
  out.list.insert(out.list.end(), base, cut.list.end());
  out.list.resize(static_cast<size_t>(room.all()), kPadding);
  out.counts.count = room.segments, out.counts.base_count = room.base_segments;
  out.counts.most_rows = room.most_rows, out.counts.rows = std::min(tokens, room.segments * room.most_rows);
  return out;
}

}  // namespace refit::cuda
