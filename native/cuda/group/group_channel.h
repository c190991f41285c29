// One rank's part in a process group: its communicator and its two staging slots.
//
// Threads: all functions run on the GPU's thread, except `slot_data`.
#pragma once
#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/group.h"
#include "cuda/group/group_gpu.h"
#include "cuda/group/nccl.h"

namespace refit::cuda {

// A call ends at the deadline, or when another thread sets `cancel`.
struct GroupWait {
  GroupDeadline deadline;
  const std::atomic<bool>* cancel = nullptr;

  bool cancelled() const { return cancel != nullptr && cancel->load(std::memory_order_relaxed); }
  double seconds() const;  // seconds left, at least 0
  NcclWait nccl() const { return {seconds(), cancel}; }
};

// A message of rank `from`, and the memory that it goes to.
struct GroupMessage {
  int from = 0;
  uint8_t* to = nullptr;
  uint64_t bytes = 0;
};

// All functions throw NcclError (kNcclInProgress: too late, or cancelled), NoMemory, CudaError. After any of them
// except NoMemory the communicator is aborted and none of its work is left on the stream.
class GroupChannel {
 public:
  // `rank`: in the group.
  GroupChannel(std::unique_ptr<GroupGpu> gpu, int rank) : gpu_(std::move(gpu)), rank_(rank) {}
  // Call close() first, unless a GPU is lost.
  ~GroupChannel() = default;
  GroupChannel(const GroupChannel&) = delete;
  GroupChannel& operator=(const GroupChannel&) = delete;

  GroupGpu& gpu() { return *gpu_; }
  int rank() const { return rank_; }

  void join(const NcclApi& api, const NcclUniqueId& id, int size, const GroupWait& wait);
  // Allocates `bytes` for each of the slots; 0 frees them.
  void stage(uint64_t bytes, int slots);
  // Enqueues broadcasts from `root` into the slot. Two may be pending at a time; each needs its own `arrive`.
  void begin(int slot, const std::vector<GroupPart>& parts, int root, const GroupWait& wait);
  // The same for receives from single ranks, which form one group of NCCL.
  void begin_messages(const std::vector<GroupMessage>& messages, const GroupWait& wait);
  // Returns when the oldest pending `begin` or `begin_messages` has arrived.
  void arrive(const GroupWait& wait);
  // Aborts the communicator if any broadcast is still pending.
  void give_up() noexcept;
  std::vector<uint8_t> read(int slot, uint64_t offset, uint64_t bytes);
  void send(const uint8_t* from, uint64_t bytes, const GroupWait& wait);
  // In place, in the given order.
  void broadcast(const std::vector<GroupSpan>& spans, int root, const GroupWait& wait);
  void barrier(const GroupWait& wait);
  // Leaves in order within so many seconds, or aborts at once; then frees everything.
  void close(bool abort, double seconds) noexcept;

  // Any thread, except during `stage`. Null if nothing is staged.
  uint8_t* slot_data(int slot) const { return slots_ == nullptr ? nullptr : slots_ + (slot == 0 ? 0 : slot_bytes_); }

 private:
  // Broadcasts that are on the stream.
  struct Flight {
    const char* what = "";
    int set = 0;  // set of marks
    size_t parts = 0;
    int root = -1;
    std::string from{};  // senders of messages
  };

  // Runs fn(). If it throws, aborts the communicator and waits for the stream before it rethrows.
  template <class F>
  void guarded(F&& fn);
  void launch(const Flight& flight, const std::vector<GroupSpan>& spans, const GroupWait& wait);
  // Returns when the stream has passed all of the flight.
  void await(const Flight& flight, const GroupWait& wait);
  void abandon() noexcept;

  const std::unique_ptr<GroupGpu> gpu_;
  const int rank_;
  std::unique_ptr<NcclComm> comm_;
  uint8_t* scalar_ = nullptr;  // for barriers
  uint8_t* slots_ = nullptr;
  uint64_t slot_bytes_ = 0;  // distance from the first slot to the second: the staged bytes, aligned
  std::deque<Flight> coming_;
  int next_set_ = 0;
};

}  // namespace refit::cuda
