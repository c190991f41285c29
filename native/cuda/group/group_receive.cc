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

// Of what is received.
void CardGroup::demand_root(int root) const {
  const int last = options_.first_rank + local_ranks() - 1;
  if (root < 0 || root >= options_.size || (root >= options_.first_rank && root <= last)) {
    throw std::invalid_argument(describe() + ": root " + std::to_string(root) +
                                " is no other rank of the group: it cannot be received from");
  }
}

void CardGroup::begin(int slot, const std::vector<GroupPart>& parts, int root, GroupDeadline deadline) {
  demand_usable("receiving");
  State& s = *state_;
  demand_root(root);
  if (std::find(s.coming.begin(), s.coming.end(), slot) != s.coming.end()) {
    throw std::invalid_argument(describe() + ": staging slot " + std::to_string(slot) + " is being received into");
  }
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
  all_or_none(deadline, [slot, parts, root, wait](GroupLane& lane) { lane.begin(slot, parts, root, wait); });
}

void CardGroup::arrive(GroupDeadline deadline) {
  State& s = *state_;
  if (s.coming.empty()) {
    demand_usable("receiving");
    throw std::invalid_argument(describe() + ": nothing is being received");
  }
  s.coming.erase(s.coming.begin());
  const GroupWait wait{deadline, &s.cancel};
  // Also of a group that was aborted meanwhile: what is on the cards still has to leave them.
  all_or_none(deadline, [wait](GroupLane& lane) { lane.arrive(wait); });
  demand_usable("receiving");
}

// After a failure nothing is under way on any lane: on others than the one that failed, what was begun would wait for
// bytes that do not come.
void CardGroup::all_or_none(GroupDeadline deadline, const std::function<void(GroupLane&)>& fn) {
  try {
    on_lanes("receiving", deadline, fn);
  } catch (...) {
    state_->coming.clear();
    if (!state_->lost) run(Clock::now(), false, [](GroupLane& lane) { lane.give_up(); });
    throw;
  }
}

std::vector<uint64_t> CardGroup::places(const std::vector<GroupPart>& parts, const std::vector<Tensor>& tensors,
                                        const std::vector<Rect>& rects) const {
  if (local_ranks() != state_->host.ranks) return std::vector<uint64_t>(parts.size(), kNoPlace);
  return places_in(state_->host, parts, tensors, rects);
}

void CardGroup::receive_in_place(const std::vector<GroupPart>& parts, int root, GroupDeadline deadline) {
  demand_idle("receiving");
  demand_root(root);
  const auto spans = spans_in(state_->host, state_->tensor_ranks, parts);
  const GroupWait wait{deadline, &state_->cancel};
  on_lanes("receiving", deadline, [spans, root, first = options_.first_rank, wait](GroupLane& lane) {
    lane.broadcast(spans[static_cast<size_t>(lane.rank() - first)], root, wait);
  });
}

std::vector<uint8_t> CardGroup::read(int slot, uint64_t offset, uint64_t bytes, GroupDeadline deadline) {
  demand_usable("reading");
  State& s = *state_;
  const uint64_t room = s.room(slot);
  if (offset > room || bytes > room - offset) {
    throw std::invalid_argument(describe() + ": " + std::to_string(bytes) + " bytes at " + std::to_string(offset) +
                                " are not in a staging slot of " + std::to_string(room));
  }
  // The cards' threads may outlive this call.
  const auto out = std::make_shared<std::vector<uint8_t>>();
  const int first = options_.first_rank;
  on_lanes("reading", deadline, [slot, offset, bytes, first, out](GroupLane& lane) {
    if (lane.rank() == first) *out = lane.read(slot, offset, bytes);
  });
  return std::move(*out);
}

}  // namespace refit::cuda
