// Cuts the rows of a product into the segments of adapter slots, on the host.
#pragma once
#include <compare>
#include <cstdint>
#include <span>
#include <vector>

#include "core/step.h"
#include "cuda/adapters/adapters.h"

namespace refit::cuda {

// Segments on the host; `at`: with `list` at the same place of a copy on the GPU.
struct SegmentList {
  std::vector<AdapterSegment> list;
  AdapterSegments counts;

  AdapterSegments at(const AdapterSegment* list_on_gpu) const {
    AdapterSegments segments = counts;
    segments.list = list_on_gpu;
    segments.host = list.data();
    return segments;
  }
};

// The sizes of a list that is rounded up, so that a decode step has one of a few (step_room.h); zeros: no adapters.
struct SegmentRoom {
  int segments = 0, base_segments = 0;
  int most_rows = 0;

  int all() const { return segments + base_segments; }
  auto operator<=>(const SegmentRoom&) const = default;
};
SegmentRoom segment_room(const AdapterSegments& counts);

// Whether a sequence of the step uses an adapter.
bool uses_adapters(const StepBatch& batch);
// The slot of each token of the step.
std::vector<int32_t> token_slots(const StepBatch& batch);

// slots: of each row; -1 for the base model.
SegmentList cut_segments(std::span<const int32_t> slots);
// The list with padding up to the room's sizes, and with these as its numbers. tokens: of the step.
SegmentList pad_segments(const SegmentList& cut, const SegmentRoom& room, int tokens);

}  // namespace refit::cuda
