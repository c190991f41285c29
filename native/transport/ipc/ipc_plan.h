// Plans which rank opens which segments of a write, in which order, and for which tensors. Plain host arithmetic.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/write/write.h"

namespace refit::ipc {

// One segment on one rank.
struct PlannedSegment {
  int segment = 0;                             // index in WriteJob.segments; the first of those with the same memory
  int tensor = 0;                              // the first tensor that is read from it
  std::vector<size_t> rects;                   // indices in WriteJob.rects, ascending
  std::vector<std::pair<int, uint64_t>> ends;  // tensors, with the end of each in bytes of the segment
  uint64_t bytes = 0;                          // bytes that the rank reads
  std::string keep;
};

struct PlannedEvent {
  const uint8_t* handle = nullptr;  // points into the job
  int tensor = 0;                   // the first tensor with this event
  int rank = 0;                     // the first rank that needs it, which opens it for all
};

struct IpcPlan {
  std::vector<std::vector<PlannedSegment>> ranks;  // of each rank, in the order of the tensors
  std::vector<PlannedEvent> events;                // without duplicates
};

// A key that is equal for two segments of one write if they are the same memory.
std::string segment_key(const Segment& segment);

// Rectangles without elements need no segment. The job must have passed check_write.
IpcPlan plan_segments(const WriteJob& job, int ranks);

}  // namespace refit::ipc
