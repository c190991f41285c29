#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/elapsed.h"
#include "cuda/group/group_state.h"
#include "cuda/group/group_weights.h"

namespace refit::cuda {

// Checks the root of a receive.
void GpuGroup::require_root(int root) const {
  const int last = options_.first_rank + local_ranks() - 1;
  if (root < 0 || root >= options_.size || (root >= options_.first_rank && root <= last)) {
    throw std::invalid_argument(describe() + ": root " + std::to_string(root) +
                                " is no other rank of the group: it cannot be received from");
  }
}

void GpuGroup::require_slot(int slot) const {
  const auto& coming = state_->coming;
  if (std::find(coming.begin(), coming.end(), slot) == coming.end()) return;
  throw std::invalid_argument(describe() + ": staging slot " + std::to_string(slot) + " is being received into");
}

void GpuGroup::begin(int slot, const std::vector<GroupPart>& parts, int root, GroupDeadline deadline) {
  require_usable("receiving");
  State& s = *state_;
  require_root(root);
  require_slot(slot);
  const uint64_t room = s.room(slot);
  for (size_t i = 0; i < parts.size(); i++) {
    const GroupPart& part = parts[i];
    if (part.offset <= room && part.bytes <= room - part.offset) continue;
    throw std::invalid_argument(describe() + ": broadcast " + std::to_string(i + 1) + " of " +
                                std::to_string(parts.size()) + " (" + std::to_string(part.bytes) + " bytes at " +
                                std::to_string(part.offset) + ") does not fit into a staging slot of " +
                                std::to_string(room));
  }
  const GroupWait wait{deadline, &s.cancel};
  s.coming.push_back(slot);
  all_or_none(deadline, [slot, parts, root, wait](GroupChannel& channel) { channel.begin(slot, parts, root, wait); });
}

std::vector<std::vector<GroupMessage>> GpuGroup::place(int slot, const std::vector<NcclMessage>& messages) const {
  const State& s = *state_;
  const auto channels = static_cast<int>(s.channels.size());
  std::vector<std::vector<GroupMessage>> placed(s.channels.size());
  std::vector<std::vector<GroupSpan>> params(s.channels.size());
  for (size_t i = 0; i < messages.size(); i++) {
    const NcclMessage& one = messages[i];
    const auto refuse = [&](const std::string& why) {
      throw std::invalid_argument(describe() + ": message " + std::to_string(i + 1) + " of " +
                                  std::to_string(messages.size()) + " (" + std::to_string(one.bytes) + " bytes at " +
                                  std::to_string(one.offset) + ") " + why);
    };
    const int channel = one.mine - options_.first_rank;
    const int sender = one.other - options_.first_rank;
    if (channel < 0 || channel >= channels) refuse("goes to rank " + std::to_string(one.mine) + ", which is not here");
    if (one.other < 0 || one.other >= options_.size || (sender >= 0 && sender < channels)) {
      refuse("comes from rank " + std::to_string(one.other) + ", which is no other rank of the group");
    }
    const auto at = static_cast<size_t>(channel);
    uint8_t* memory = s.channels[at]->slot_data(slot);
    uint64_t room = s.room(slot);
    if (one.param >= 0) {
      if (params[at].empty()) params[at] = s.host.params(s.tensor_ranks[at], one.set);
      if (static_cast<size_t>(one.param) >= params[at].size()) {
        refuse("goes to parameter " + std::to_string(one.param) + " of " + std::to_string(params[at].size()));
      }
      const GroupSpan& param = params[at][static_cast<size_t>(one.param)];
      memory = static_cast<uint8_t*>(param.data);
      room = param.bytes;
    }
    if (one.offset > room || one.bytes > room - one.offset) {
      refuse((one.param >= 0 ? "does not fit into a parameter of " : "does not fit into a staging slot of ") +
             std::to_string(room));
    }
    placed[at].push_back({one.other, memory + one.offset, one.bytes});
  }
  return placed;
}

void GpuGroup::begin_messages(int slot, const std::vector<NcclMessage>& messages, GroupDeadline deadline) {
  require_usable("receiving");
  State& s = *state_;
  require_slot(slot);
  const auto placed = place(slot, messages);
  const GroupWait wait{deadline, &s.cancel};
  s.coming.push_back(slot);
  all_or_none(deadline, [placed, first = options_.first_rank, wait](GroupChannel& channel) {
    channel.begin_messages(placed[static_cast<size_t>(channel.rank() - first)], wait);
  });
}

void GpuGroup::arrive(GroupDeadline deadline) {
  State& s = *state_;
  if (s.coming.empty()) {
    require_usable("receiving");
    throw std::invalid_argument(describe() + ": nothing is being received");
  }
  s.coming.erase(s.coming.begin());
  const GroupWait wait{deadline, &s.cancel};
  // This also runs for a group that was aborted meanwhile: its kernels still have to leave the GPUs.
  all_or_none(deadline, [wait](GroupChannel& channel) { channel.arrive(wait); });
  require_usable("receiving");
}

// After a failure no channel has pending work. Without the give_up, the other channels' broadcasts would wait for bytes
// that never come.
void GpuGroup::all_or_none(GroupDeadline deadline, const std::function<void(GroupChannel&)>& fn) {
  try {
    on_channels("receiving", deadline, fn);
  } catch (...) {
    state_->coming.clear();
    if (!state_->lost) run(Clock::now(), false, [](GroupChannel& channel) { channel.give_up(); });
    throw;
  }
}

std::vector<uint64_t> GpuGroup::places(const std::vector<GroupPart>& parts, const std::vector<Tensor>& tensors,
                                       const std::vector<Rect>& rects, int set) const {
  if (local_ranks() != state_->host.ranks) return std::vector<uint64_t>(parts.size(), kNoPlace);
  return places_in(state_->host, parts, tensors, rects, set);
}

void GpuGroup::receive_in_place(const std::vector<GroupPart>& parts, int set, int root, GroupDeadline deadline) {
  require_idle("receiving");
  require_root(root);
  const auto spans = spans_in(state_->host, state_->tensor_ranks, parts, set);
  const GroupWait wait{deadline, &state_->cancel};
  on_channels("receiving", deadline, [spans, root, first = options_.first_rank, wait](GroupChannel& channel) {
    channel.broadcast(spans[static_cast<size_t>(channel.rank() - first)], root, wait);
  });
}

std::vector<uint8_t> GpuGroup::read(int slot, uint64_t offset, uint64_t bytes, GroupDeadline deadline) {
  require_usable("reading");
  State& s = *state_;
  const uint64_t room = s.room(slot);
  if (offset > room || bytes > room - offset) {
    throw std::invalid_argument(describe() + ": " + std::to_string(bytes) + " bytes at " + std::to_string(offset) +
                                " are not in a staging slot of " + std::to_string(room));
  }
  // The GPUs' threads may outlive this call.
  const auto out = std::make_shared<std::vector<uint8_t>>();
  const int first = options_.first_rank;
  on_channels("reading", deadline, [slot, offset, bytes, first, out](GroupChannel& channel) {
    if (channel.rank() == first) *out = channel.read(slot, offset, bytes);
  });
  return std::move(*out);
}

}  // namespace refit::cuda
