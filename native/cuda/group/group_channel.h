// One rank's part in a process group: its communicator and its two staging slots.
//
// Threads: everything runs on the GPU's thread, but for `slot_data`.
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

// When a call has to end: at the deadline, or once another thread sets `cancel`.
struct GroupWait {
  GroupDeadline deadline;
  const std::atomic<bool>* cancel = nullptr;

  bool cancelled() const { return cancel != nullptr && cancel->load(std::memory_order_relaxed); }
  double seconds() const;  // that are left, at least 0
  NcclWait nccl() const { return {seconds(), cancel}; }
};

// All throw NcclError (kNcclInProgress: too late, or cancelled), NoMemory, CudaError. After any but NoMemory the
// communicator has been aborted and nothing of it is left on the stream.
class GroupChannel {
 public:
  // `rank`: in the group.
  GroupChannel(std::unique_ptr<GroupGpu> gpu, int rank) : gpu_(std::move(gpu)), rank_(rank) {}
  // After close(), or where a GPU is lost.
  ~GroupChannel() = default;
  GroupChannel(const GroupChannel&) = delete;
  GroupChannel& operator=(const GroupChannel&) = delete;

  GroupGpu& gpu() { return *gpu_; }
  int rank() const { return rank_; }

  void join(const NcclApi& api, const NcclUniqueId& id, int size, const GroupWait& wait);
  // Room for `bytes` in each of so many slots; 0 frees them.
  void stage(uint64_t bytes, int slots);
  // Enqueues broadcasts from `root` into the slot. Two at a time, each with an `arrive` of its own.
  void begin(int slot, const std::vector<GroupPart>& parts, int root, const GroupWait& wait);
  // Returns when the first that was begun has come.
  void arrive(const GroupWait& wait);
  // Aborts the communicator where anything that was begun has not been waited for.
  void give_up() noexcept;
  std::vector<uint8_t> read(int slot, uint64_t offset, uint64_t bytes);
  void send(const uint8_t* from, uint64_t bytes, const GroupWait& wait);
  // In place: of all, in order.
  void broadcast(const std::vector<GroupSpan>& spans, int root, const GroupWait& wait);
  void barrier(const GroupWait& wait);
  // Leaves, in order within so many seconds or at once, and frees everything.
  void close(bool abort, double seconds) noexcept;

  // Any thread, but not during `stage`. Null where nothing is staged.
  uint8_t* slot_data(int slot) const { return slots_ == nullptr ? nullptr : slots_ + (slot == 0 ? 0 : slot_bytes_); }

 private:
  // Broadcasts on the stream.
  struct Flight {
    const char* what = "";
    int set = 0;  // of marks
    size_t parts = 0;
    int root = -1;
  };

  // fn(); where it throws, the communicator is aborted first and the stream comes to its end.
  template <class F>
  void guarded(F&& fn);
  void launch(const Flight& flight, const std::vector<GroupSpan>& spans, const GroupWait& wait);
  // Returns when the stream has passed all of it.
  void await(const Flight& flight, const GroupWait& wait);
  void abandon() noexcept;

  const std::unique_ptr<GroupGpu> gpu_;
  const int rank_;
  std::unique_ptr<NcclComm> comm_;
  uint8_t* scalar_ = nullptr;  // of barriers
  uint8_t* slots_ = nullptr;
  uint64_t slot_bytes_ = 0;  // from the first to the second: `bytes` of stage, aligned
  std::deque<Flight> coming_;
  int next_set_ = 0;
};

}  // namespace refit::cuda
