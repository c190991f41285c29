#include "cuda/group/group.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <future>
#include <new>
#include <stdexcept>
#include <utility>

#include "core/device.h"
#include "core/elapsed.h"
#include "core/look.h"
#include "core/memory_error.h"
#include "cuda/group/group_library.h"
#include "cuda/group/group_messages.h"
#include "cuda/group/group_state.h"

namespace refit::cuda {
namespace {

// How long a thread may stay in a call after the deadline (an abort, a wait for kernels to end) before its GPU counts
// as lost.
constexpr double kGraceSeconds = 60;
constexpr double kEndSeconds = 10;
// Small parts arrive sooner than a sleeping thread wakes up.
constexpr std::chrono::milliseconds kLook{30};

}  // namespace

GpuGroup::GpuGroup(GroupHost host, const NcclGroupOptions& options)
    : options_(options), api_(open_group_library(options.library)), state_(std::make_shared<State>(std::move(host))) {
  const auto refuse = [](const std::string& why) { throw GroupError(GroupErrorKind::kRefused, why); };
  const int ranks = state_->host.ranks;
  if (options.core_rank >= ranks) {
    refuse("tensor-parallel rank " + std::to_string(options.core_rank) + " does not exist, the engine has " +
           std::to_string(ranks));
  }
  for (int rank = 0; rank < ranks; rank++) {
    if (options.core_rank < 0 || options.core_rank == rank) state_->tensor_ranks.push_back(rank);
  }
  if (options.first_rank < 0 || options.size - options.first_rank < local_ranks()) {
    refuse("ranks " + std::to_string(options.first_rank) + " to " +
           std::to_string(options.first_rank + local_ranks() - 1) + " do not fit into a group of " +
           std::to_string(options.size) + ": the engine takes part with " + std::to_string(local_ranks()) +
           " tensor-parallel ranks, from its first rank on");
  }
}

GpuGroup::~GpuGroup() {
  abort("the group is dropped");
  end();
}

int GpuGroup::local_ranks() const { return static_cast<int>(state_->tensor_ranks.size()); }

std::string GpuGroup::describe() const {
  const int last = options_.first_rank + local_ranks() - 1;
  return "NCCL group of " + std::to_string(options_.size) + " (rank" + (local_ranks() > 1 ? "s " : " ") +
         std::to_string(options_.first_rank) + (local_ranks() > 1 ? "-" + std::to_string(last) : "") + " here)";
}

std::string GpuGroup::library() const { return nccl_version(api_.version) + ", " + api_.path; }

void GpuGroup::require_usable(const char* phase) const {
  const State& s = *state_;
  {
    const std::lock_guard lock(s.mutex);
    if (!s.reason.empty()) {
      throw GroupError(GroupErrorKind::kBroken, describe() + ", " + phase + ": the group failed before: " + s.reason);
    }
  }
  if (s.ended) throw std::invalid_argument(describe() + " has ended");
  if (!s.connected) throw std::invalid_argument(describe() + " is not connected");
}

void GpuGroup::require_idle(const char* phase) const {
  require_usable(phase);
  require_free_slots();
}

void GpuGroup::require_free_slots() const {
  if (!state_->coming.empty()) throw std::invalid_argument(describe() + ": its slots are being received into");
}

// Runs fn on all channels at once, each on its GPU's thread; returns when all have ended. `cancel`: the first failure
// ends the other calls.
GpuGroup::Outcome GpuGroup::run(GroupDeadline deadline, bool cancel, const std::function<void(GroupChannel&)>& fn) {
  const auto began = Clock::now();
  State& s = *state_;
  // The time of each failure, before its communicator was aborted: the first failure makes the others fail.
  const auto failed = std::make_shared<std::vector<Clock::time_point>>(s.channels.size(), Clock::time_point::max());
  const auto own = std::make_shared<const std::function<void(GroupChannel&)>>(fn);
  std::vector<std::future<void>> futures;
  for (size_t i = 0; i < s.channels.size(); i++) {
    futures.push_back(s.channels[i]->gpu().run([state = state_, failed, own, cancel, i] {
      try {
        (*own)(*state->channels[i]);
      } catch (...) {
        (*failed)[i] = noticed_at();
        if (cancel) state->cancel = true;
        throw;
      }
    }));
  }
  const auto patience = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(kGraceSeconds));
  const auto last = std::max(deadline, began) + patience;
  Outcome out;
  std::exception_ptr lost;
  for (size_t i = 0; i < futures.size(); i++) {
    GroupGpu& gpu = s.channels[i]->gpu();
    look_for(kLook, [&] { return futures[i].wait_for(std::chrono::seconds(0)) == std::future_status::ready; });
    if (futures[i].wait_until(last) != std::future_status::ready) {
      lose(gpu.label() + " has been stuck in \"" + gpu.last_operation() + "\" of an " + describe() + " for " +
           seconds_text(seconds_since(began)) + " s");
    }
    try {
      futures[i].get();
    } catch (const DeviceLost& error) {
      if (!lost) lost = std::current_exception();
      s.host.lose(error.what());
    } catch (...) {
      if (out.channel >= 0 && (*failed)[static_cast<size_t>(out.channel)] <= (*failed)[i]) continue;
      out.channel = static_cast<int>(i);
      out.error = std::current_exception();
    }
  }
  if (lost) {
    s.lost = true;
    std::rethrow_exception(lost);
  }
  out.seconds = seconds_since(began);
  return out;
}

void GpuGroup::lose(const std::string& message) {
  state_->lost = true;
  state_->host.lose(message);
  throw DeviceLost(message);
}

// Turns a channel's failure into a GroupError. The group is unusable after it.
void GpuGroup::on_channels(const char* phase, GroupDeadline deadline, const std::function<void(GroupChannel&)>& fn) {
  const Outcome out = run(deadline, true, fn);
  if (!out.error) return;
  GroupErrorKind kind = GroupErrorKind::kBroken;
  std::string message;
  bool memory = false;
  try {
    std::rethrow_exception(out.error);
  } catch (const NcclError& error) {
    if (error.result == kNcclInProgress) kind = GroupErrorKind::kTimeout;
    kind = refusal_of(error.what()).value_or(kind);
    message = error.what();
  } catch (const std::bad_alloc& error) {
    memory = true;
    message = error.what();
  } catch (const std::exception& error) {
    message = error.what();
  }
  State& s = *state_;
  GroupChannel& channel = *s.channels[static_cast<size_t>(out.channel)];
  std::string text = describe() + ", " + phase + ", rank " + std::to_string(channel.rank()) + " (" +
                     channel.gpu().label() + ") after " + seconds_text(out.seconds) + " s: " + message;
  {
    const std::lock_guard lock(s.mutex);
    if (s.aborted) {
      kind = GroupErrorKind::kBroken;
      text = describe() + ", " + phase + ", after " + seconds_text(out.seconds) + " s: " + s.reason;
    } else {
      s.reason = text;
    }
  }
  if (memory) std::rethrow_exception(out.error);
  throw GroupError(kind, text);
}

void GpuGroup::connect(const uint8_t* id, GroupDeadline deadline) {
  State& s = *state_;
  {
    const std::lock_guard lock(s.mutex);
    if (!s.reason.empty()) throw GroupError(GroupErrorKind::kBroken, describe() + ", connecting: " + s.reason);
  }
  if (s.ended || !s.channels.empty()) {
    throw std::invalid_argument(describe() + (s.ended ? " has ended" : " was connected before"));
  }
  if (Clock::now() >= deadline) {
    throw GroupError(GroupErrorKind::kTimeout, describe() + ", connecting: the deadline has passed before it began");
  }
  open_channels();
  NcclUniqueId unique;
  static_assert(sizeof unique.bytes == kIdBytes);
  std::memcpy(unique.bytes, id, sizeof unique.bytes);
  const GroupWait wait{deadline, &s.cancel};
  on_channels(("connecting by NCCL " + library()).c_str(), deadline,
              [this, unique, wait](GroupChannel& channel) { channel.join(api_, unique, options_.size, wait); });
  s.connected = true;
  if (options_.warm_up) {
    on_channels("warming up", deadline, [wait](GroupChannel& channel) { channel.barrier(wait); });
  }
}

void GpuGroup::open_channels() {
  State& s = *state_;
  std::string failed;
  for (size_t i = 0; i < s.tensor_ranks.size() && failed.empty(); i++) {
    try {
      auto gpu = s.host.open(s.tensor_ranks[i]);
      s.channels.push_back(std::make_unique<GroupChannel>(std::move(gpu), options_.first_rank + static_cast<int>(i)));
    } catch (const DeviceLost& error) {
      lose(error.what());
    } catch (const std::exception& error) {
      failed =
          describe() + ", connecting, tensor-parallel rank " + std::to_string(s.tensor_ranks[i]) + ": " + error.what();
    }
  }
  if (failed.empty()) return;
  {
    const std::lock_guard lock(s.mutex);
    if (s.reason.empty()) s.reason = failed;
  }
  throw GroupError(GroupErrorKind::kBroken, failed);
}

void GpuGroup::stage(uint64_t bytes, int slots) {
  State& s = *state_;
  if (s.ended || s.channels.empty()) throw std::invalid_argument(describe() + " is not connected");
  require_free_slots();
  if (bytes > (uint64_t{1} << 48)) throw std::bad_alloc();
  if (bytes == s.slot_bytes && (bytes == 0 || slots == s.slots)) return;
  s.slot_bytes = 0;
  const Outcome out = run(Clock::now(), false, [bytes, slots](GroupChannel& channel) { channel.stage(bytes, slots); });
  if (!out.error) {
    s.slot_bytes = bytes;
    s.slots = slots;
    return;
  }
  run(Clock::now(), false, [](GroupChannel& channel) { channel.stage(0, 0); });  // all or none
  std::rethrow_exception(out.error);
}

StagedSlot GpuGroup::staged(int slot) const {
  const State& s = *state_;
  if (s.room(slot) == 0) throw std::invalid_argument(describe() + ": slot " + std::to_string(slot) + " has no room");
  if (local_ranks() != s.host.ranks) {
    throw std::invalid_argument(describe() +
                                " is one tensor-parallel rank's alone: its slots are no source of a write");
  }
  StagedSlot out;
  out.source.bytes = s.slot_bytes;
  for (const auto& channel : s.channels) out.source.rank_data.push_back(channel->slot_data(slot));
  return out;
}

void GpuGroup::send(const uint8_t* data, uint64_t bytes, GroupDeadline deadline) {
  require_idle("sending");
  State& s = *state_;
  if (bytes > s.slot_bytes) {
    throw std::invalid_argument(describe() + ": " + std::to_string(bytes) +
                                " bytes to send do not fit into a staging slot of " + std::to_string(s.slot_bytes));
  }
  if (bytes == 0) return;
  const GroupWait wait{deadline, &s.cancel};
  const int root = options_.first_rank;
  on_channels("sending", deadline, [data, bytes, root, wait](GroupChannel& channel) {
    if (channel.rank() == root) return channel.send(data, bytes, wait);
    channel.begin(0, {{0, bytes}}, root, wait);
    channel.arrive(wait);
  });
}

void GpuGroup::params(Device&, const CoreConfig&, int rank, int set, int root, GroupDeadline deadline) {
  params(rank, set, root, deadline);
}

void GpuGroup::params(int rank, int set, int root, GroupDeadline deadline) {
  require_idle("parameters");
  State& s = *state_;
  if (local_ranks() != 1 || s.tensor_ranks[0] != rank) {
    throw std::invalid_argument(describe() + ": parameters of tensor-parallel rank " + std::to_string(rank) +
                                " travel in a group that has no other rank of this engine (coreRank)");
  }
  if (root < 0 || root >= options_.size) {
    throw std::invalid_argument(describe() + ": root " + std::to_string(root) + " is no rank of the group");
  }
  std::vector<GroupSpan> spans = s.host.params(rank, set);
  std::erase_if(spans, [](const GroupSpan& span) { return span.bytes == 0; });
  const GroupWait wait{deadline, &s.cancel};
  on_channels("parameters", deadline,
              [spans, root, wait](GroupChannel& channel) { channel.broadcast(spans, root, wait); });
}

void GpuGroup::barrier(GroupDeadline deadline) {
  require_idle("barrier");
  const GroupWait wait{deadline, &state_->cancel};
  on_channels("barrier", deadline, [wait](GroupChannel& channel) { channel.barrier(wait); });
}

void GpuGroup::abort(const std::string& reason) noexcept {
  State& s = *state_;
  try {
    const std::lock_guard lock(s.mutex);
    if (s.reason.empty()) {
      s.reason = reason.empty() ? "aborted" : reason;
      s.aborted = true;
    }
  } catch (...) {
  }
  s.cancel = true;
}

void GpuGroup::end() noexcept {
  State& s = *state_;
  if (s.ended) return;
  s.ended = true;
  s.slot_bytes = 0;
  bool abort = false;
  {
    const std::lock_guard lock(s.mutex);
    abort = !s.reason.empty() || !s.connected;
  }
  try {
    if (!s.lost) run(Clock::now(), false, [abort](GroupChannel& channel) { channel.close(abort, kEndSeconds); });
  } catch (...) {
  }
  if (s.lost) {
    new std::shared_ptr<State>(state_);  // never deleted: threads that are stuck use it
  } else {
    s.channels.clear();
  }
}

}  // namespace refit::cuda
