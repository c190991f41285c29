// Copies bytes of a segment to the host: small payloads that describe larger ones, and payloads that the CPU
// processes.
#pragma once
#include <cstdint>

#include "transport/ipc/ipc_driver.h"

namespace refit::ipc {

// Waits until the senders' events of the segment are done, at most `timeout_ms`. Throws std::runtime_error
// with the same messages as a failed write.
void await_events(Driver& driver, int rank, const Segment& segment, int timeout_ms);

// A segment that is open on one rank. It must not be used for handles that a write keeps open on that rank.
class FetchMapping {
 public:
  // Throws std::runtime_error, also if [offset, offset + bytes) is not inside the segment.
  FetchMapping(Driver& driver, int rank, const Segment& segment, uint64_t offset, uint64_t bytes);
  ~FetchMapping();
  FetchMapping(const FetchMapping&) = delete;
  FetchMapping& operator=(const FetchMapping&) = delete;

  // The address of the first byte in the rank.
  const uint8_t* data() const { return data_; }

 private:
  Driver& driver_;
  const int rank_;
  Mapping mapping_;
  const uint8_t* data_ = nullptr;
};

}  // namespace refit::ipc
