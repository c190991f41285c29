// Fault points of test builds: a named place fails, stalls or ends the process at its k-th pass. A product build
// (REFIT_FAULTS not defined) has no trace of them.
#pragma once

#ifdef REFIT_WITHOUT_FAULT_POINTS
// Such an object serves product and test builds (native/addon.cmake): a fault point in it would be missing or shipped.
#error "include core/fault.h in the source, or in a header that the source includes itself"
#endif

#ifdef REFIT_FAULTS
#include <cstdint>

namespace refit::fault {

enum class Point : uint8_t { kRead, kCopy, kAlloc, kStep, kIpcOpen, kIpcEvent, kIpcClose, kEnd };
enum class Action : uint8_t { kFail, kStall, kSlow, kDie };

// Arms one fault, in place of any other: `at` counts passes of `point` from now on, the first is 1. It acts once; kSlow
// stalls every pass from there on, until it is taken back.
void arm(Point point, int64_t at, Action action, int stall_ms);
// Takes the fault back and ends a stall under way.
void disarm();
// Whether one is armed that has not acted yet; true of kSlow until it is taken back.
bool pending();
// One pass. True when the caller must fail; stalls or ends the process by itself.
bool pass(Point point);

}  // namespace refit::fault

#define REFIT_FAULT(point) (::refit::fault::pass(::refit::fault::Point::point))
#else
#define REFIT_FAULT(point) (false)
#endif
