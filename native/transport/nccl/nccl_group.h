// A process group whose local ranks are the GPUs of a CUDA device. The device creates it (core/device.h) and outlives
// it.
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
  bool warm_up = false;   // sum one float32 as soon as all ranks have joined, as vLLM's PyNcclCommunicator does
  std::string library{};  // the file of NCCL; empty: search the usual places
  std::vector<std::string> peer_gpus{};  // known UUIDs of other ranks' GPUs
};

// A message of one rank elsewhere to one rank of this process: ncclSend there, ncclRecv here.
struct NcclMessage {
  int mine = 0, other = 0;  // ranks in the group
  int param = -1;           // the parameter that it goes to; -1: into the slot
  uint64_t offset = 0;      // in the slot, or in the parameter
  uint64_t bytes = 0;
  int set = 0;  // of weights, if it goes to a parameter; the same for all of a call
};

class NcclGroup : public Group {
 public:
  static constexpr int kIdBytes = 128;

  // "2.28.9" and the path of its file.
  virtual std::string library() const = 0;

  // Creates the communicator with all other ranks; each local rank has a thread and a stream of its own; `id` has
  // kIdBytes. It allocates, like `stage` and `end`: no rank may run a step meanwhile. Call it once. Throws like the
  // functions of Group.
  virtual void connect(const uint8_t* id, GroupDeadline deadline) = 0;

  // Places where broadcasts can be received straight into the weights: find_places of core/write/places.h. All are
  // kNoPlace in a group that does not have all ranks of the engine. Throws std::runtime_error while the weights' memory
  // is released. They are the same in each set of weights; `set` has its memory.
  virtual std::vector<uint64_t> places(const std::vector<GroupPart>& parts, const std::vector<Tensor>& tensors,
                                       const std::vector<Rect>& rects, int set) const = 0;
  void receive(int slot, const std::vector<GroupPart>& parts, int root, GroupDeadline deadline) final {
    begin(slot, parts, root, deadline);
    arrive(deadline);
  }
  // `receive` in two steps: `begin` returns when the broadcasts are on the GPUs' streams, and `arrive` when those of
  // the oldest pending call have arrived, so the next ones follow without a gap. One call may be pending for each slot.
  // While any is pending, call only `staged`, `read`, `abort` and `end`. After an abort, still call `arrive` for each,
  // or `end`: that takes them off the GPUs.
  virtual void begin(int slot, const std::vector<GroupPart>& parts, int root, GroupDeadline deadline) = 0;
  virtual void arrive(GroupDeadline deadline) = 0;
  // `begin` for messages of torch's batch_isend_irecv: one group of receives on each local rank. Messages of a pair of
  // ranks arrive in this order. Those to parameters go straight into the weights, with the rules of `receive_in_place`.
  virtual void begin_messages(int slot, const std::vector<NcclMessage>& messages, GroupDeadline deadline) = 0;
  // Like `receive`, but into a set of weights of each rank: the parts' offsets are those of `places`. No step and no
  // write of the same weights may run meanwhile, and concurrent reads see a mix of old and new bytes. After a failure
  // any byte of the parts may be old, new or neither.
  virtual void receive_in_place(const std::vector<GroupPart>& parts, int set, int root, GroupDeadline deadline) = 0;
};

}  // namespace refit
