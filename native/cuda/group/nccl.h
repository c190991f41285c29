// A communicator of NCCL that blocks a thread only for a given time, and whose errors name what failed.
#pragma once
#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>

#include "cuda/group/nccl_api.h"

namespace refit::cuda {

class NcclError : public std::runtime_error {
 public:
  NcclError(int result, const std::string& message) : std::runtime_error(message), result(result) {}
  // When the error was noticed: before the communicator was aborted, which other ranks notice.
  const std::chrono::steady_clock::time_point at = std::chrono::steady_clock::now();
  const int result;  // NcclResult; kNcclInProgress: it took too long, or was cancelled
};

// When the exception in flight was noticed; works for any exception.
std::chrono::steady_clock::time_point noticed_at();

// How long a call may wait for other ranks. `cancel` (optional) ends the wait when another thread sets it.
struct NcclWait {
  double seconds = 60;
  const std::atomic<bool>* cancel = nullptr;
};

// The id of a new communicator. One rank creates it and sends it to the others. Throws NcclError.
NcclUniqueId new_nccl_id(const NcclApi& api);

// One rank of a communicator. One thread at a time uses it, with the rank's GPU current. Calls only launch work:
// cudaStreamQuery reports whether the stream has passed it, and check() whether the communicator still works.
//
// All functions throw NcclError. After one the communicator is unusable, and all ranks should abort theirs.
class NcclComm {
 public:
  // Joins as `rank` of `ranks`; returns when all ranks have joined. No two ranks may be on one GPU. `wait` applies to
  // all later calls, too.
  NcclComm(const NcclApi& api, const NcclUniqueId& id, int ranks, int rank, NcclWait wait);
  // Aborts, unless finish() or abort() was called.
  ~NcclComm();
  NcclComm(const NcclComm&) = delete;
  NcclComm& operator=(const NcclComm&) = delete;

  int ranks() const { return ranks_; }
  int rank() const { return rank_; }
  const NcclApi& api() const { return api_; }
  void set_wait(NcclWait wait) { wait_ = wait; }

  // `count` elements of `type`; see NcclApi. All ranks make the same calls in the same order.
  void send(const void* data, size_t count, NcclType type, int peer, NcclStream stream);
  void recv(void* data, size_t count, NcclType type, int peer, NcclStream stream);
  void broadcast(const void* from, void* to, size_t count, NcclType type, int root, NcclStream stream);
  void all_reduce(const void* from, void* to, size_t count, NcclType type, NcclOp op, NcclStream stream);
  void all_gather(const void* from, void* to, size_t count, NcclType type, NcclStream stream);
  // Starts the calls that `calls` makes together: sends and receives between ranks need that.
  template <class F>
  void group(F&& calls) {
    begin_group();
    try {
      calls();
    } catch (...) {
      drop_group();
      throw;
    }
    end_group();
  }

  // Throws if the communicator has failed meanwhile: a peer that died, a link that broke. Cheap.
  void check();

  // Ends in order: waits for the pending work of this rank. Other ranks must already have received what they need.
  void finish();
  // Ends at once, even kernels that wait for a peer. Another thread may call it only while the owner is in no call of
  // this object (it may wait for the stream); to end a call, use `cancel`.
  void abort();

 private:
  void begin_group();
  void end_group();
  void drop_group();
  // Handles the result of a library call, and waits for a call that continues in the background.
  void settle(int result, const char* doing);
  [[noreturn]] void fail(int result, const char* doing);
  std::string who() const;

  const NcclApi& api_;
  const int ranks_, rank_;
  NcclWait wait_;
  std::atomic<ncclComm*> comm_{nullptr};
  bool grouped_ = false;
};

}  // namespace refit::cuda
