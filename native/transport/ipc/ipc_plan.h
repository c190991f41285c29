// Which rank opens which segments of a write, in which order, and for what: plain host arithmetic.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/write/write.h"

namespace refit::ipc {

// One segment on one rank.
struct PlannedSegment {
  int segment = 0;                             // in WriteJob.segments, of several that are the same memory the first
  int tensor = 0;                              // the first that is read from it
  std::vector<size_t> rects;                   // in WriteJob.rects, rising
  std::vector<std::pair<int, uint64_t>> ends;  // tensors, and how many bytes of the segment each reaches over
  uint64_t bytes = 0;                          // that the rank reads
  std::string keep;
};

struct PlannedEvent {
  const uint8_t* handle = nullptr;  // in the job
  int tensor = 0;                   // the first that comes with it
  int rank = 0;                     // the first that needs it: opens it for all
};

struct IpcPlan {
  std::vector<std::vector<PlannedSegment>> ranks;  // each rank's, in the order of the tensors
  std::vector<PlannedEvent> events;                // equal handles once
};

// What makes two segments the same memory, within one write.
std::string segment_key(const Segment& segment);

// Rectangles of no elements need nothing. The job must have passed check_write.
IpcPlan plan_segments(const WriteJob& job, int ranks);

}  // namespace refit::ipc
