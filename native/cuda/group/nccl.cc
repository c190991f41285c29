#include "cuda/group/nccl.h"

#include <chrono>
#include <future>
#include <memory>
#include <thread>

#include "core/elapsed.h"

namespace refit::cuda {
namespace {

constexpr std::chrono::seconds kAbortPatience{10};

// "unhandled cuda error (Cuda failure 2 'out of memory')"
std::string words(const NcclApi& api, int result, ncclComm* comm) {
  const char* const error = api.get_error_string(result);
  const char* const last = api.get_last_error(comm);
  std::string text = error == nullptr ? "result " + std::to_string(result) : error;
  std::string more = last == nullptr ? "" : last;
  while (!more.empty() && (more.back() == '\n' || more.back() == ' ')) more.pop_back();
  if (!more.empty()) text += " (" + more + ")";
  return text;
}

}  // namespace

Clock::time_point noticed_at() {
  try {
    throw;
  } catch (const NcclError& error) {
    return error.at;
  } catch (...) {
    return Clock::now();
  }
}

NcclUniqueId new_nccl_id(const NcclApi& api) {
  NcclUniqueId id;
  const int result = api.get_unique_id(&id);
  if (result == kNcclSuccess) return id;
  throw NcclError(result, api.name() + " made no id for a communicator: " + words(api, result, nullptr));
}

NcclComm::NcclComm(const NcclApi& api, const NcclUniqueId& id, int ranks, int rank, NcclWait wait)
    : api_(api), ranks_(ranks), rank_(rank), wait_(wait) {
  NcclConfig config = nccl_config(api.version);
  ncclComm* comm = nullptr;
  const int result = api.init_rank_config(&comm, ranks, id, rank, &config);
  comm_ = comm;
  try {
    settle(result, "joining the communicator");
  } catch (...) {
    abort();  // the destructor does not run after an exception
    throw;
  }
}

NcclComm::~NcclComm() {
  try {
    abort();
  } catch (const std::exception&) {
    // Without a thread for it the communicator stays.
  }
}

void NcclComm::send(const void* data, size_t count, NcclType type, int peer, NcclStream stream) {
  settle(api_.send(data, count, type, peer, comm_, stream), "ncclSend");
}

void NcclComm::recv(void* data, size_t count, NcclType type, int peer, NcclStream stream) {
  settle(api_.recv(data, count, type, peer, comm_, stream), "ncclRecv");
}

void NcclComm::broadcast(const void* from, void* to, size_t count, NcclType type, int root, NcclStream stream) {
  settle(api_.broadcast(from, to, count, type, root, comm_, stream), "ncclBroadcast");
}

void NcclComm::all_reduce(const void* from, void* to, size_t count, NcclType type, NcclOp op, NcclStream stream) {
  settle(api_.all_reduce(from, to, count, type, op, comm_, stream), "ncclAllReduce");
}

void NcclComm::all_gather(const void* from, void* to, size_t count, NcclType type, NcclStream stream) {
  settle(api_.all_gather(from, to, count, type, comm_, stream), "ncclAllGather");
}

void NcclComm::begin_group() {
  const int result = api_.group_start();
  if (result != kNcclSuccess) fail(result, "ncclGroupStart");
  grouped_ = true;
}

void NcclComm::end_group() {
  grouped_ = false;
  settle(api_.group_end(), "ncclGroupEnd");
}

// The library counts nested groups per thread, so a failed group must be ended, too.
void NcclComm::drop_group() {
  grouped_ = false;
  api_.group_end();
}

void NcclComm::check() {
  int state = kNcclSuccess;
  const int result = api_.get_async_error(comm_, &state);
  if (result != kNcclSuccess) fail(result, "ncclCommGetAsyncError");
  if (state != kNcclSuccess && state != kNcclInProgress) fail(state, "a communicator that had been joined");
}

void NcclComm::finish() {
  if (comm_ == nullptr) return;
  try {
    settle(api_.finalize(comm_), "ncclCommFinalize");
  } catch (...) {
    abort();
    throw;
  }
  // Not ncclCommDestroy, which returns only when the other ranks of this machine destroy theirs (seen with 2.28): a GPU
  // must not be idle that long.
  abort();
}

void NcclComm::abort() {
  ncclComm* const comm = comm_.exchange(nullptr);
  if (comm == nullptr) return;
  // Even so, NCCL's proxy may wait for connections of other ranks of this machine. A thread waits for it here, so
  // nothing else has to.
  const auto gone = std::make_shared<std::promise<void>>();
  const std::future<void> done = gone->get_future();
  std::thread([abort = api_.abort, comm, gone] {
    abort(comm);
    gone->set_value();
  }).detach();
  done.wait_for(kAbortPatience);
}

// Within a group NCCL only collects the calls.
void NcclComm::settle(int result, const char* doing) {
  if (result != kNcclSuccess && result != kNcclInProgress) fail(result, doing);
  if (grouped_) return;
  const Clock::time_point began = Clock::now();
  for (;;) {
    ncclComm* const comm = comm_;
    if (comm == nullptr) throw NcclError(kNcclInProgress, who() + ", " + doing + ": the communicator was aborted");
    int state = kNcclInProgress;
    const int asked = api_.get_async_error(comm, &state);
    if (asked != kNcclSuccess) fail(asked, "ncclCommGetAsyncError");
    if (state == kNcclSuccess) return;
    if (state != kNcclInProgress) fail(state, doing);
    if (wait_.cancel != nullptr && wait_.cancel->load(std::memory_order_relaxed)) {
      throw NcclError(kNcclInProgress,
                      who() + ", " + doing + ": given up after " + seconds_text(seconds_since(began)) + " s");
    }
    if (seconds_since(began) > wait_.seconds) {
      throw NcclError(kNcclInProgress, who() + ", " + doing + ": not done after " + seconds_text(wait_.seconds) +
                                           " s; another rank has not come or cannot be reached (NCCL_DEBUG=INFO makes "
                                           "NCCL log more)");
    }
    // One of NCCL's threads makes a launch in about 100 us, so sleeping would take longer than the launch. Creating a
    // communicator takes much longer, so that wait sleeps.
    const double passed = seconds_since(began);
    if (passed < 0.5e-3) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(passed < 20e-3 ? 20 : 200));
    }
  }
}

void NcclComm::fail(int result, const char* doing) {
  throw NcclError(result, who() + ", " + doing + ": " + words(api_, result, comm_));
}

std::string NcclComm::who() const {
  return api_.name() + ", rank " + std::to_string(rank_) + " of " + std::to_string(ranks_);
}

}  // namespace refit::cuda
