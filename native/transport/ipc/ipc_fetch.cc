#include "transport/ipc/ipc_fetch.h"

#include <chrono>
#include <stdexcept>
#include <string>

#include "core/look.h"
#include "transport/ipc/ipc_messages.h"

namespace refit::ipc {
namespace {

// Destroys the event on every path. Errors of the destruction are ignored: they must not lose the bytes.
struct OpenEvent {
  OpenEvent(Driver& driver, int rank, const uint8_t* handle)
      : driver(driver), rank(rank), id(driver.open_event(rank, handle)) {}
  ~OpenEvent() {
    try {
      driver.close_event(rank, id);
    } catch (const std::exception&) {
    }
  }
  Driver& driver;
  const int rank;
  const uint64_t id;
};

}  // namespace

void await_events(Driver& driver, int rank, const Segment& segment, int timeout_ms) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
  try {
    for (size_t at = 0; at < segment.events.size(); at += Segment::kHandleBytes) {
      const OpenEvent event(driver, rank, segment.events.data() + at);
      for (Backoff backoff; !driver.event_done(rank, event.id); backoff.sleep()) {
        if (std::chrono::steady_clock::now() > deadline) {
          throw std::runtime_error("its sender's work on the GPU was not done after " + std::to_string(timeout_ms) +
                                   " ms");
        }
      }
    }
  } catch (const Refused& e) {
    throw std::runtime_error(cannot_open_event(e));
  }
}

FetchMapping::FetchMapping(Driver& driver, int rank, const Segment& segment, uint64_t offset, uint64_t bytes)
    : driver_(driver), rank_(rank) {
  try {
    mapping_ = driver.open(rank, segment);
  } catch (const Refused& e) {
    throw std::runtime_error(cannot_open(e, segment));
  }
  if (offset > mapping_.bytes || bytes > mapping_.bytes - offset) {
    driver.close(rank, mapping_);
    throw std::runtime_error(too_short(offset + bytes, mapping_.bytes));
  }
  data_ = reinterpret_cast<const uint8_t*>(mapping_.base) + offset;
}

FetchMapping::~FetchMapping() {
  try {
    driver_.close(rank_, mapping_);
  } catch (const std::exception&) {
    // The sender has ended or the GPU is lost, so there is nothing to give back.
  }
}

}  // namespace refit::ipc
