// A process group whose ranks here are the GPUs of a CUDA device: the device makes it (core/device.h) and outlives it.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/group.h"

namespace refit {

// ncclGroup in src/native/groups.ts.
struct NcclGroupOptions {
  int size = 0;           // ranks of the group
  int first_rank = 0;     // the first of this process's
  int core_rank = -1;     // the only tensor-parallel rank that takes part; -1: all do
  bool warm_up = false;   // a sum of one float32 right after all have joined, as vLLM's PyNcclCommunicator
  std::string library{};  // the file of NCCL; empty: where it is found
  std::vector<std::string> peer_gpus{};  // UUIDs of other ranks' GPUs, as far as they are known
};

class NcclGroup : public Group {
 public:
  static constexpr int kIdBytes = 128;

  // "2.28.9" and the file that it is from.
  virtual std::string library() const = 0;

  // Makes the communicator with all the others, each rank on a thread and a stream of its own; `id` has kIdBytes. It
  // allocates, as `stage` and `end` do: no rank may run a step meanwhile. Once. Throws as the functions of Group.
  virtual void connect(const uint8_t* id, GroupDeadline deadline) = 0;

  // Where broadcasts can be received into the weights themselves: find_places of core/places.h. kNoPlace for all of
  // them in a group that not all ranks of the engine are in. Throws std::runtime_error while the memory of the weights
  // is released.
  virtual std::vector<uint64_t> places(const std::vector<GroupPart>& parts, const std::vector<Tensor>& tensors,
                                       const std::vector<Rect>& rects) const = 0;
  void receive(int slot, const std::vector<GroupPart>& parts, int root, GroupDeadline deadline) final {
    begin(slot, parts, root, deadline);
    arrive(deadline);
  }
  // `receive` in two: `begin` returns when the broadcasts are on the GPUs' streams, and `arrive` when those of the
  // first call that was not waited for yet have come, so that the next ones follow there without a gap. One for each
  // slot at a time. Until all have been waited for nothing else is called but `staged`, `read`, `abort` and `end`;
  // after an abort they are waited for as well, or ended: that takes them off the GPUs.
  virtual void begin(int slot, const std::vector<GroupPart>& parts, int root, GroupDeadline deadline) = 0;
  virtual void arrive(GroupDeadline deadline) = 0;
  // As `receive`, but into the weights of each rank: the parts' offsets are those of `places`. No step and
  // no write of the same weights may run meanwhile, and who reads them sees old and new bytes. After a failure any byte
  // of the parts may be old, new or neither.
  virtual void receive_in_place(const std::vector<GroupPart>& parts, int root, GroupDeadline deadline) = 0;
};

}  // namespace refit
