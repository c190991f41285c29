#include "core/fault.h"

#ifdef REFIT_FAULTS
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <mutex>

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
int64_t disarmed = 0;  // number of calls of `disarm`
std::condition_variable on_disarm;

void stall(int milliseconds, int64_t before) {
  std::unique_lock lock(mutex);
  on_disarm.wait_for(lock, std::chrono::milliseconds(milliseconds), [before] { return disarmed != before; });
}

}  // namespace

void arm(Point point, int64_t at, Action action, int stall_ms) {
  const std::lock_guard lock(mutex);
  armed = {point, at, action, stall_ms};
}

void disarm() {
  const std::lock_guard lock(mutex);
  armed = {};
  disarmed++;
  on_disarm.notify_all();
}

bool pending() {
  const std::lock_guard lock(mutex);
  return armed.left > 0;
}

bool pass(Point point) {
  Armed now;
  int64_t before;
  {
    const std::lock_guard lock(mutex);
    if (armed.left == 0 || armed.point != point || --armed.left > 0) return false;
    now = armed;
    if (now.action == Action::kSlow) armed.left = 1;
    before = disarmed;
  }
  switch (now.action) {
    case Action::kFail:
      return true;
    case Action::kStall:
    case Action::kSlow:
      stall(now.stall_ms, before);
      return false;
    case Action::kDie:
      // Ends as a crash does: no destructor, no exit handler. A shell shows 134 for SIGABRT.
      _exit(134);
  }
  return false;
}

}  // namespace refit::fault
#endif
