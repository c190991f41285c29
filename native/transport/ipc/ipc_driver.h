// The driver calls that sharing GPU memory between processes needs. One implementation is CUDA's
// (cuda/weights/ipc_driver.h); tests have one on shared-memory files. The code that plans, orders, counts and closes
// uses only this interface.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>

#include "core/write/write.h"

namespace refit::ipc {

// Why something was refused. There is one cause for each remedy.
enum class Cause {
  kUnknown,
  kGone,          // the sender has freed it, or has ended
  kSameProcess,   // exported by this same process
  kNotVisible,    // on a GPU that this process does not see
  kNoPeer,        // on a GPU that the rank's GPU does not reach
  kNoMemory,      // no memory or no addresses for the mapping
  kNotSupported,  // the driver, the GPU or the kind of memory does not support sharing
};

struct Refused : std::runtime_error {
  Refused(Cause cause, const std::string& what) : std::runtime_error(what), cause(cause) {}
  const Cause cause;
};

// A segment as one rank sees it.
struct Mapping {
  uint64_t base = 0;  // address of the first byte in the rank
  uint64_t bytes = 0;
  bool blocks = false;  // the mapping of an expandable segment
};

// Any thread may call these, also for several ranks at once. All throw Refused.
class Driver {
 public:
  virtual ~Driver() = default;
  virtual int ranks() const = 0;
  virtual Mapping open(int rank, const Segment& segment) = 0;
  virtual void close(int rank, const Mapping& mapping) = 0;
  // `handle` has Segment::kHandleBytes bytes.
  virtual uint64_t open_event(int rank, const uint8_t* handle) = 0;
  // Returns true if everything that the sender had enqueued before it recorded the event is done. Work that any GPU
  // gets from then on sees the results. Does not wait.
  virtual bool event_done(int rank, uint64_t event) = 0;
  virtual void close_event(int rank, uint64_t event) = 0;
};

}  // namespace refit::ipc
