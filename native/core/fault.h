// Fault points of test builds: a named place in the code fails, stalls or ends the process when it is passed for the
// k-th time. A product build (REFIT_FAULTS not defined) contains none of them.
#pragma once

#ifdef REFIT_WITHOUT_FAULT_POINTS
// Objects with this definition are linked into product and test builds alike, so a fault point in them would be missing
// in one or shipped in the other.
#error "include core/fault.h in the source, or in a header that the source includes itself"
#endif

#ifdef REFIT_FAULTS
#include <cstdint>

namespace refit::fault {

enum class Point : uint8_t { kRead, kCopy, kAlloc, kStep, kIpcOpen, kIpcEvent, kIpcClose, kEnd, kBegin, kResult };
enum class Action : uint8_t { kFail, kStall, kSlow, kDie };

// Arms one fault and disarms any other: `at` counts passes of `point` from now on, the first is 1. It acts once; kSlow
// stalls every pass from there on, until it is disarmed.
void arm(Point point, int64_t at, Action action, int stall_ms);
// Disarms the fault and ends a current stall.
void disarm();
// Whether a fault is armed and has not acted yet; always true for kSlow until it is disarmed.
bool pending();
// Counts one pass. Returns true if the caller must fail; stalls or ends the process itself.
bool pass(Point point);

}  // namespace refit::fault

#define REFIT_FAULT(point) (::refit::fault::pass(::refit::fault::Point::point))
#else
#define REFIT_FAULT(point) (false)
#endif
