// A process group of ranks of this process and ranks of other processes (torch trainers, other engines). The binding
// and everything above it use only this interface. native/transport/gloo/gloo_group.h implements it, and so does NCCL's
// group.
//
// Threads: the functions that wait are called by one thread at a time, the group's own
// (native/binding/groups/groups.h), and never by an event loop. `abort` and `staged` may be called by any thread at any
// time.
#pragma once
#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/model.h"
#include "core/write/write.h"

namespace refit {

class Device;

// GroupErrorCode in src/native/groups.ts.
enum class GroupErrorKind : uint8_t {
  kTimeout = 0,
  kBroken,
  kRefused,
  kSharedGpu,    // two ranks of an NCCL group are on one GPU
  kNcclVersion,  // the ranks of an NCCL group have versions of NCCL that do not work together
};

// After kTimeout and kBroken the group cannot be used any more and must be ended. The message names phase, peer, rank
// and elapsed time.
struct GroupError : std::runtime_error {
  GroupError(GroupErrorKind kind, const std::string& message) : std::runtime_error(message), kind(kind) {}
  GroupErrorKind kind;
};

// Every wait ends at this time, with kTimeout.
using GroupDeadline = std::chrono::steady_clock::time_point;

// One broadcast into a staging slot (PART_FIELDS in src/native/groups.ts).
struct GroupPart {
  uint64_t offset = 0;  // in the slot
  uint64_t bytes = 0;
};

constexpr int kGroupSlots = 2;

// A staging slot as the source of a write.
struct StagedSlot {
  Source source;
  // Owns the memory: held while a write reads it, so that neither `stage` nor the group's end frees it under the write.
  std::shared_ptr<const void> memory;
};

class Group {
 public:
  // Aborts the group unless it has been ended. No call may be running.
  virtual ~Group() = default;

  // Description for messages: `gloo group of 5 (ranks 1-4 here)`.
  virtual std::string describe() const = 0;

  // Allocates `bytes` for each of the first `slots` slots and frees the others; 0 bytes frees all. If it throws
  // std::bad_alloc, no slot has memory.
  virtual void stage(uint64_t bytes, int slots = kGroupSlots) = 0;
  // Throws std::invalid_argument if the slot has no memory.
  virtual StagedSlot staged(int slot) const = 0;

  // The following throw GroupError. For a mistake of the caller they throw std::invalid_argument before anything is
  // sent.
  //
  // Receives one broadcast for each part, in order, from rank `root` (which is in another process), into the slot.
  virtual void receive(int slot, const std::vector<GroupPart>& parts, int root, GroupDeadline deadline) = 0;
  // The bytes of a slot, from the first rank of this process. For messages whose content decides the next steps.
  virtual std::vector<uint8_t> read(int slot, uint64_t offset, uint64_t bytes, GroupDeadline deadline) = 0;
  // Broadcasts host memory from the first rank of this process.
  virtual void send(const uint8_t* data, uint64_t bytes, GroupDeadline deadline) = 0;
  // Broadcasts all parameters of the device from rank `root` straight into their places; see groupParams in
  // src/native/groups.ts. `config` is the device's. During the call, other threads may read the parameters on the
  // sending side, but not on a receiving side. `set`: of weights.
  virtual void params(Device& device, const CoreConfig& config, int rank, int set, int root,
                      GroupDeadline deadline) = 0;
  // torch's `barrier` of the backend. Returns when all ranks have reached it.
  virtual void barrier(GroupDeadline deadline) = 0;

  // Any thread may call this. The running call and every later one throw kBroken with the reason at once.
  virtual void abort(const std::string& reason) noexcept = 0;
  // Leaves the group without waiting for the other ranks; if that matters, call `barrier` first. Frees everything
  // except slots that a write still holds.
  virtual void end() noexcept = 0;
};

}  // namespace refit
