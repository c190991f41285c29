// What sharing a card's memory between processes needs of a driver. CUDA's is one (cuda/ipc_driver.h); tests have one
// of shared-memory files. All that plans, orders, counts and closes is above it, and knows no driver.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>

#include "core/write/write.h"

namespace refit::ipc {

// Why something was refused, as far as the cure differs.
enum class Cause {
  kUnknown,
  kGone,          // the sender has freed it, or has ended
  kSameProcess,   // exported by this very process
  kNotVisible,    // on a card that this process does not see
  kNoPeer,        // on a card that the rank's card does not reach
  kNoMemory,      // no memory or no addresses for the mapping
  kNotSupported,  // the driver, the card or the kind of memory cannot be shared
};

struct Refused : std::runtime_error {
  Refused(Cause cause, const std::string& what) : std::runtime_error(what), cause(cause) {}
  const Cause cause;
};

// A segment as one rank sees it.
struct Mapping {
  uint64_t base = 0;  // where the rank reads its first byte
  uint64_t bytes = 0;
  bool blocks = false;  // of an expandable segment
};

// Threads: any, also for several ranks at once. All throw Refused.
class Driver {
 public:
  virtual ~Driver() = default;
  virtual int ranks() const = 0;
  virtual Mapping open(int rank, const Segment& segment) = 0;
  virtual void close(int rank, const Mapping& mapping) = 0;
  // Of Segment::kHandleBytes.
  virtual uint64_t open_event(int rank, const uint8_t* handle) = 0;
  // Whether all that the sender had under way when it recorded the event is done: what any card is given from then on
  // sees it. Does not wait.
  virtual bool event_done(int rank, uint64_t event) = 0;
  virtual void close_event(int rank, uint64_t event) = 0;
};

}  // namespace refit::ipc
