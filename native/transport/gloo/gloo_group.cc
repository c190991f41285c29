#include "transport/gloo/gloo_group.h"

#include <algorithm>
#include <cstdio>
#include <stdexcept>

#include "core/arena.h"
#include "core/device.h"
#include "core/memory_error.h"
#include "core/pool.h"

namespace refit {
namespace {

using Clock = std::chrono::steady_clock;

std::vector<int> checked_ranks(int size, std::vector<int> ranks) {
  std::sort(ranks.begin(), ranks.end());
  const bool distinct = std::adjacent_find(ranks.begin(), ranks.end()) == ranks.end();
  if (ranks.empty() || !distinct || ranks.front() < 0 || ranks.back() >= size) {
    throw std::invalid_argument("ranks: expected one or more distinct ranks from 0 to " + std::to_string(size - 1));
  }
  return ranks;
}

void check_span(uint64_t slot, uint64_t offset, uint64_t bytes) {
  if (offset <= slot && bytes <= slot - offset) return;
  throw std::invalid_argument("bytes " + std::to_string(offset) + " to " + std::to_string(offset + bytes) +
                              " are not in a slot of " + std::to_string(slot));
}

std::string seconds_since(Clock::time_point then) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", std::chrono::duration<double>(Clock::now() - then).count());
  return text;
}

}  // namespace

struct GlooGroup::Memory {
  Arena arena;
};

GlooGroup::GlooGroup(int size, std::vector<int> ranks, const std::string& host)
    : members_{size, checked_ranks(size, std::move(ranks))}, mesh_(size, members_.mine, host) {}

bool GlooGroup::is_mine(int rank) const { return std::binary_search(members_.mine.begin(), members_.mine.end(), rank); }

std::vector<uint8_t> GlooGroup::address(int rank) const {
  const auto found = std::find(members_.mine.begin(), members_.mine.end(), rank);
  if (found == members_.mine.end()) throw std::invalid_argument("rank " + std::to_string(rank) + " is not here");
  return mesh_.address(static_cast<size_t>(found - members_.mine.begin()));
}

std::string GlooGroup::describe() const {
  std::string ranks;
  for (const int rank : members_.mine) ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
  return "gloo group of " + std::to_string(members_.size) + " (here: rank " + ranks + ")";
}

void GlooGroup::break_off(GroupErrorKind kind, const char* phase, const std::string& what) {
  std::string message = describe() + ": " + phase + ": " + what + ", after " + seconds_since(began_);
  {
    const std::lock_guard lock(mutex_);
    if (broken_.empty()) broken_ = message;
  }
  // Closing the connections ends the other ranks' waits, too.
  mesh_.close(true);
  throw GroupError(kind, message);
}

void GlooGroup::check_usable(const char* phase) const {
  {
    const std::lock_guard lock(mutex_);
    if (!broken_.empty()) {
      throw GroupError(GroupErrorKind::kBroken,
                       describe() + ": " + phase + ": the group is unusable since: " + broken_);
    }
  }
  if (!connected_) throw std::invalid_argument(describe() + " is not connected");
}

void GlooGroup::check_root(int root) const {
  if (root >= 0 && root < members_.size) return;
  throw std::invalid_argument("root: expected a rank from 0 to " + std::to_string(members_.size - 1) + ", got " +
                              std::to_string(root));
}

template <typename F>
void GlooGroup::run(const char* phase, GroupDeadline deadline, F&& collective) {
  began_ = Clock::now();
  // The catch clauses use it: the message about a fault describes the progress so far.
  decltype(collective()) work;
  const auto detail = [&](const gloo::Link* link) {
    const std::string text = work == nullptr ? "" : work->where(link);
    return text.empty() ? "" : "; " + text;
  };
  try {
    work = collective();
    for (;;) {
      if (aborted_.load()) break;
      if (work->step()) return;
      if (Clock::now() >= deadline) {
        break_off(GroupErrorKind::kTimeout, phase, "the deadline has passed" + detail(nullptr));
      }
      mesh_.poll(deadline);
    }
  } catch (const gloo::LinkFault& fault) {
    const std::string who = fault.link == nullptr ? "" : fault.link->name() + " ";
    break_off(GroupErrorKind::kBroken, phase, who + fault.what + detail(fault.link));
  } catch (const GroupError& error) {
    if (error.kind == GroupErrorKind::kTimeout) throw;
    break_off(GroupErrorKind::kBroken, phase, error.what() + detail(nullptr));
  } catch (...) {
    // Its transfers are gone, and pairs still point to them.
    {
      const std::lock_guard lock(mutex_);
      if (broken_.empty()) broken_ = "out of memory";
    }
    aborted_.store(true);
    mesh_.close(true);
    throw;
  }
  std::string reason;
  {
    const std::lock_guard lock(mutex_);
    reason = std::exchange(broken_, "");
  }
  break_off(GroupErrorKind::kBroken, phase, reason + detail(nullptr));
}

namespace {

// Connecting, as work that progresses by itself.
class Meeting : public gloo::Collective {
 public:
  explicit Meeting(gloo::Mesh& mesh) : mesh_(mesh) {}

  bool step() override { return mesh_.met(); }

  std::string where(const gloo::Link* link) const override {
    if (link != nullptr) return "";
    std::string missing;
    for (const gloo::Link& one : mesh_.links()) {
      if (one.pair.connected() || (one.lazy && !one.connects)) continue;
      missing += (missing.empty() ? "" : ", ") + one.name() + (one.connects ? "" : " (it connects to this side)");
    }
    return "not connected: " + missing;
  }

 private:
  gloo::Mesh& mesh_;
};

}  // namespace

void GlooGroup::connect(const std::vector<std::vector<uint8_t>>& peers, GroupDeadline deadline) {
  if (connected_ || !mesh_.links().empty()) throw std::invalid_argument(describe() + " has been connected already");
  if (peers.size() != static_cast<size_t>(members_.size)) {
    throw std::invalid_argument("peers: expected a value for each of " + std::to_string(members_.size) +
                                " ranks, got " + std::to_string(peers.size()));
  }
  mesh_.meet(peers);
  run("connect", deadline, [&] { return std::make_unique<Meeting>(mesh_); });
  connected_ = true;
}

void GlooGroup::stage(uint64_t bytes, int slots) {
  std::shared_ptr<Memory> made[kGroupSlots];
  {
    const std::lock_guard lock(mutex_);
    bool is_there = bytes != 0;
    for (int i = 0; i < kGroupSlots; i++) {
      is_there &= i < slots ? slots_[i] != nullptr && slots_[i]->arena.bytes() == bytes : slots_[i] == nullptr;
    }
    if (is_there) return;
    for (auto& slot : slots_) slot.reset();
  }
  if (bytes == 0) return;
  try {
    Pool here(1);
    for (int i = 0; i < slots; i++) {
      made[i] = std::make_shared<Memory>(Memory{Arena(bytes)});
      made[i]->arena.populate(here);
    }
  } catch (const std::bad_alloc&) {
    throw NoMemory(describe() + ": not enough memory for " + std::to_string(slots) + " staging slots of " +
                   std::to_string(bytes) + " bytes");
  }
  const std::lock_guard lock(mutex_);
  std::move(std::begin(made), std::end(made), slots_);
}

StagedSlot GlooGroup::staged(int slot) const {
  const std::lock_guard lock(mutex_);
  const auto& memory = slots_[slot];
  if (memory == nullptr) throw std::invalid_argument(describe() + " has nothing staged");
  StagedSlot out;
  out.source.data = memory->arena.data();
  out.source.bytes = memory->arena.bytes();
  out.memory = memory;
  return out;
}

void GlooGroup::broadcast(const char* phase, std::vector<gloo::Piece> pieces, int root, GroupDeadline deadline) {
  run(phase, deadline,
      [&] { return std::make_unique<gloo::Broadcasts>(mesh_, members_, root, std::move(pieces), next_tag_); });
}

void GlooGroup::receive(int slot, const std::vector<GroupPart>& parts, int root, GroupDeadline deadline) {
  check_usable("receive");
  check_root(root);
  if (is_mine(root)) throw std::invalid_argument("root: rank " + std::to_string(root) + " is of this process");
  const StagedSlot memory = staged(slot);
  std::vector<gloo::Piece> pieces;
  for (const GroupPart& part : parts) {
    check_span(memory.source.bytes, part.offset, part.bytes);
    pieces.push_back({const_cast<uint8_t*>(memory.source.data) + part.offset, part.bytes});
  }
  broadcast("receive", std::move(pieces), root, deadline);
}

void GlooGroup::receive_messages(int slot, std::vector<gloo::Message> messages, const std::vector<GroupPart>& parts,
                                 GroupDeadline deadline) {
  check_usable("receive");
  const StagedSlot memory = staged(slot);
  for (size_t i = 0; i < messages.size(); i++) {
    gloo::Message& message = messages[i];
    if (!is_mine(message.mine) || is_mine(message.other) || message.other < 0 || message.other >= members_.size) {
      throw std::invalid_argument("messages: expected one from a rank elsewhere to a rank of this process, got " +
                                  std::to_string(message.other) + " to " + std::to_string(message.mine));
    }
    check_span(memory.source.bytes, parts[i].offset, parts[i].bytes);
    message.into = {const_cast<uint8_t*>(memory.source.data) + parts[i].offset, parts[i].bytes};
  }
  run("receive", deadline, [&] { return std::make_unique<gloo::Messages>(mesh_, std::move(messages)); });
}

std::vector<uint8_t> GlooGroup::read(int slot, uint64_t offset, uint64_t bytes, GroupDeadline) {
  check_usable("read");
  const StagedSlot memory = staged(slot);
  check_span(memory.source.bytes, offset, bytes);
  const uint8_t* const from = memory.source.data + offset;
  return {from, from + bytes};
}

void GlooGroup::send(const uint8_t* data, uint64_t bytes, GroupDeadline deadline) {
  check_usable("send");
  broadcast("send", {{const_cast<uint8_t*>(data), bytes}}, members_.mine.front(), deadline);
}

void GlooGroup::params(Device& device, const CoreConfig& config, int rank, int set, int root, GroupDeadline deadline) {
  check_usable("parameters");
  check_root(root);
  if (config.device != "cpu") {
    throw std::invalid_argument(describe() + ": gloo only uses host memory, and the parameters are on GPUs: use NCCL");
  }
  std::vector<gloo::Piece> pieces;
  for (size_t param = 0; param < config.params.size(); param++) {
    const Param& shape = config.params[param];
    if (!is_weight(shape)) continue;  // each engine has its own adapters in its slots
    pieces.push_back({static_cast<uint8_t*>(const_cast<void*>(device.address(rank, static_cast<int>(param), set))),
                      static_cast<uint64_t>(shape.rows) * static_cast<uint64_t>(shape.cols) * size_of(shape.dtype)});
  }
  broadcast("parameters", std::move(pieces), root, deadline);
}

void GlooGroup::barrier(GroupDeadline deadline) {
  check_usable("barrier");
  run("barrier", deadline, [&] { return std::make_unique<gloo::Barrier>(mesh_, members_, next_tag_); });
}

void GlooGroup::abort(const std::string& reason) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (broken_.empty()) broken_ = "it was ended: " + reason;
  }
  aborted_.store(true);
  mesh_.wake();
}

void GlooGroup::end() noexcept {
  bool hard = false;
  {
    const std::lock_guard lock(mutex_);
    hard = !broken_.empty();
    if (!hard) broken_ = "it has ended";
    for (auto& slot : slots_) slot.reset();
  }
  mesh_.close(hard);
}

}  // namespace refit
