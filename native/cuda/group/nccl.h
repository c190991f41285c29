// A communicator of NCCL that never blocks a thread for longer than it is told to, and tells in words what failed.
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
  // When it was noticed: before the communicator was aborted, which others notice.
  const std::chrono::steady_clock::time_point at = std::chrono::steady_clock::now();
  const int result;  // NcclResult; kNcclInProgress: it took too long, or was cancelled
};

// When what is being caught was noticed; for any exception.
std::chrono::steady_clock::time_point noticed_at();

// How long a call may wait for other ranks. `cancel`, where given, ends the wait when another thread sets it.
struct NcclWait {
  double seconds = 60;
  const std::atomic<bool>* cancel = nullptr;
};

// For a communicator to be; one rank calls it and tells the others. Throws NcclError.
NcclUniqueId new_nccl_id(const NcclApi& api);

// One rank of a communicator, used by one thread at a time, with the rank's GPU current. Calls only launch: that the
// stream has passed them, cudaStreamQuery tells, and check() whether it still can.
//
// All throw NcclError. After one the communicator is of no use, and all ranks should abort theirs.
class NcclComm {
 public:
  // Joins as `rank` of `ranks`; returns when all have come. No two ranks may be on one GPU. `wait` goes for all later
  // calls as well.
  NcclComm(const NcclApi& api, const NcclUniqueId& id, int ranks, int rank, NcclWait wait);
  // Aborts what neither finish() nor abort() has ended.
  ~NcclComm();
  NcclComm(const NcclComm&) = delete;
  NcclComm& operator=(const NcclComm&) = delete;

  int ranks() const { return ranks_; }
  int rank() const { return rank_; }
  const NcclApi& api() const { return api_; }
  void set_wait(NcclWait wait) { wait_ = wait; }

  // `count` of `type`; see NcclApi. All ranks make the same calls in the same order.
  void send(const void* data, size_t count, NcclType type, int peer, NcclStream stream);
  void recv(void* data, size_t count, NcclType type, int peer, NcclStream stream);
  void broadcast(const void* from, void* to, size_t count, NcclType type, int root, NcclStream stream);
  void all_reduce(const void* from, void* to, size_t count, NcclType type, NcclOp op, NcclStream stream);
  void all_gather(const void* from, void* to, size_t count, NcclType type, NcclStream stream);
  // The calls that `calls` makes here begin together: sends and receives between ranks need it.
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

  // Throws where the communicator has failed in the meantime: a peer that died, a link that broke. Cheap.
  void check();

  // The orderly end: waits for what is under way here. What others have still to get from here must have reached them.
  void finish();
  // The end at once, also of kernels that wait for a peer. Another thread may call it only while the owner is in no
  // call of this object, but in a wait for the stream, say; a call is ended by `cancel`.
  void abort();

 private:
  void begin_group();
  void end_group();
  void drop_group();
  // After a call of the library: its answer, and what becomes of the call that went on without us.
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
