#include "core/fault.h"

#ifdef REFIT_FAULTS
#include <unistd.h>

#include <chrono>
#include <mutex>
#include <thread>

namespace refit::fault {
namespace {

struct Armed {
  Point point = Point::kRead;
  int64_t left = 0;  // passes until it acts; 0: disarmed
  Action action = Action::kFail;
  int stall_ms = 0;
};

std::mutex mutex;
Armed armed;

}  // namespace

void arm(Point point, int64_t at, Action action, int stall_ms) {
  const std::lock_guard lock(mutex);
  armed = {point, at, action, stall_ms};
}

void disarm() {
  const std::lock_guard lock(mutex);
  armed = {};
}

bool pass(Point point) {
  Armed now;
  {
    const std::lock_guard lock(mutex);
    if (armed.left == 0 || armed.point != point || --armed.left > 0) return false;
    now = armed;
  }
  switch (now.action) {
    case Action::kFail:
      return true;
    case Action::kStall:
      std::this_thread::sleep_for(std::chrono::milliseconds(now.stall_ms));
      return false;
    case Action::kDie:
      // As a crash would: no destructor, no exit handler. 134 is what a shell shows for SIGABRT.
      _exit(134);
  }
  return false;
}

}  // namespace refit::fault
#endif
