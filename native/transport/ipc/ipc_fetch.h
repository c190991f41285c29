// Bytes of a segment for the host: small payloads that tell what is to be done with larger ones, and those that are
// worked on by the CPU.
#pragma once
#include <cstdint>

#include "transport/ipc/ipc_driver.h"

namespace refit::ipc {

// Waits until the senders' events of the segment are done, at most `timeout_ms`. Throws std::runtime_error, in the
// words of a write that fails.
void await_events(Driver& driver, int rank, const Segment& segment, int timeout_ms);

// A segment that is open on one rank. Not for handles that a write keeps open there.
class FetchMapping {
 public:
  // Throws std::runtime_error also where [offset, offset + bytes) is not inside of it.
  FetchMapping(Driver& driver, int rank, const Segment& segment, uint64_t offset, uint64_t bytes);
  ~FetchMapping();
  FetchMapping(const FetchMapping&) = delete;
  FetchMapping& operator=(const FetchMapping&) = delete;

  // Where the rank reads the first of the bytes.
  const uint8_t* data() const { return data_; }

 private:
  Driver& driver_;
  const int rank_;
  Mapping mapping_;
  const uint8_t* data_ = nullptr;
};

}  // namespace refit::ipc
