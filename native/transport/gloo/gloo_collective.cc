#include "transport/gloo/gloo_collective.h"

#include <algorithm>

namespace refit::gloo {
namespace {

// Broadcasts requested ahead. More gain nothing, and gloo's senders search their requests one by one.
constexpr size_t kWindow = 64;

std::string progress(uint64_t done, uint64_t bytes) {
  return std::to_string(done) + " of " + std::to_string(bytes) + " bytes";
}

// Errors of a pair do not know the rank, so this adds the link.
template <typename F>
void with_link(const Link& link, F&& fn) {
  try {
    fn();
  } catch (const PairFault& fault) {
    throw LinkFault{&link, fault.what};
  }
}

std::string missing(const Link& link) { return link.pair.connected() ? "" : ", which has not connected yet"; }

}  // namespace

Broadcasts::Broadcasts(Mesh& mesh, const Members& members, int root, std::vector<Piece> pieces, uint32_t& tag)
    : pieces_(std::move(pieces)), tag_(tag) {
  // If the root is in this process, all bytes are here from the start.
  const bool here = std::find(members.mine.begin(), members.mine.end(), root) != members.mine.end();
  int depth = members.size + 1;
  for (const int rank : members.mine) {
    const TreePlace place = tree_place(rank, root, members.size);
    if (place.parent) {
      if (Link* const link = mesh.link(rank, *place.parent)) {
        // The rank nearest to the root waits for no other rank of this process, so all others can wait for it.
        if (!here && tree_depth(rank, root, members.size) < depth) {
          depth = tree_depth(rank, root, members.size);
          keeper_ = static_cast<int>(edges_.size());
        }
        edges_.push_back({link, true, false});
      }
    }
    for (const int child : place.children) {
      if (Link* const link = mesh.link(rank, child)) edges_.push_back({link, false, true});
    }
  }
  for (Link& link : mesh.links()) {
    if (std::none_of(edges_.begin(), edges_.end(), [&](const Edge& edge) { return edge.link == &link; })) {
      idle_.push_back(&link);
    }
  }
}

void Broadcasts::open(size_t piece) {
  auto running = std::make_unique<Running>();
  running->piece = piece;
  running->slot = make_slot(kBroadcast, tag_++);
  running->transfers.resize(edges_.size());
  const Piece& memory = pieces_[piece];
  for (size_t i = 0; i < edges_.size(); i++) {
    Transfer& transfer = running->transfers[i];
    transfer.bytes = memory.bytes;
    if (edges_[i].sends) transfer.from = memory.memory;
    if (static_cast<int>(i) == keeper_) transfer.into = memory.memory;
  }
  running_.push_back(std::move(running));
  Running& opened = *running_.back();
  for (size_t i = 0; i < edges_.size(); i++) {
    Transfer* const transfer = &opened.transfers[i];
    with_link(*edges_[i].link, [&] {
      edges_[i].link->pair.open(opened.slot, edges_[i].receives ? transfer : nullptr,
                                edges_[i].sends ? transfer : nullptr);
    });
  }
  for (Link* const link : idle_) {
    with_link(*link, [&] { link->pair.open(opened.slot, nullptr, nullptr); });
  }
}

bool Broadcasts::advance(Running& running) {
  if (!running.sending && (keeper_ < 0 || running.transfers[keeper_].complete)) {
    running.sending = true;
    for (size_t i = 0; i < edges_.size(); i++) {
      if (!edges_[i].sends) continue;
      with_link(*edges_[i].link, [&] { edges_[i].link->pair.start(running.slot, running.transfers[i]); });
    }
  }
  return std::all_of(running.transfers.begin(), running.transfers.end(),
                     [](const Transfer& transfer) { return transfer.complete; });
}

bool Broadcasts::step() {
  for (;;) {
    while (next_ < pieces_.size() && running_.size() < kWindow) open(next_++);
    for (const auto& running : running_) advance(*running);
    const size_t before = running_.size();
    while (!running_.empty() && advance(*running_.front())) running_.pop_front();
    if (running_.empty() && next_ == pieces_.size()) return true;
    if (running_.size() == before || next_ == pieces_.size()) return false;
  }
}

std::string Broadcasts::where(const Link* link) const {
  for (const auto& running : running_) {
    for (size_t i = 0; i < edges_.size(); i++) {
      const Transfer& transfer = running->transfers[i];
      const Edge& edge = edges_[i];
      if (transfer.complete || (link != nullptr && edge.link != link)) continue;
      // A send that has not started waits for another rank's bytes: that rank is to blame.
      if (link == nullptr && edge.sends && !transfer.started) continue;
      std::string text = progress(transfer.done, transfer.bytes) + " of " + slot_name(running->slot) + " (part " +
                         std::to_string(running->piece + 1) + " of " + std::to_string(pieces_.size()) + ") had ";
      text += edge.receives ? "come" : "gone";
      if (link != nullptr) return text;
      text += (edge.receives ? " from " : " to ") + edge.link->name() + missing(*edge.link);
      return transfer.wrong.empty() ? text : text + ", which " + transfer.wrong;
    }
  }
  return "";
}

Messages::Messages(Mesh& mesh, std::vector<Message> messages) {
  for (Message& message : messages) {
    Arriving& one = arriving_.emplace_back();
    one.message = message;
    one.link = mesh.link(message.mine, message.other);
    one.transfer.bytes = message.into.bytes;
    one.transfer.into = message.into.memory;
  }
}

bool Messages::step() {
  if (!is_open_) {
    is_open_ = true;
    for (Arriving& one : arriving_) {
      with_link(*one.link, [&] { one.link->pair.expect_message(one.message.tag, one.transfer); });
    }
  }
  return std::all_of(arriving_.begin(), arriving_.end(), [](const Arriving& one) { return one.transfer.complete; });
}

std::string Messages::where(const Link* link) const {
  std::string text;
  size_t more = 0;
  for (const Arriving& one : arriving_) {
    if (one.transfer.complete || (link != nullptr && one.link != link)) continue;
    if (text.size() > 400) {
      more++;
      continue;
    }
    text += (text.empty() ? "" : ", ") + progress(one.transfer.done, one.transfer.bytes) + " of " +
            slot_name(one.message.tag) + " had come";
    if (link == nullptr) text += " from " + one.link->name() + missing(*one.link);
  }
  return more == 0 ? text : text + " and " + std::to_string(more) + " more";
}

Barrier::Barrier(Mesh& mesh, const Members& members, uint32_t& tag)
    : members_(members), slot_(make_slot(kBarrier, tag++)) {
  for (const int rank : members.mine) places_.push_back({rank, 1, false});
  for (Link& link : mesh.links()) {
    Way& way = ways_.emplace_back();
    way.link = &link;
    const int apart = (link.other - link.mine + members.size) % members.size;
    for (int distance = 1; distance < members.size; distance *= 2) {
      way.sends = way.sends || apart == distance;
      way.receives = way.receives || members.size - apart == distance;
    }
    with_link(link,
              [&] { link.pair.open(slot_, way.receives ? &way.receive : nullptr, way.sends ? &way.send : nullptr); });
  }
}

Barrier::Way* Barrier::way(int mine, int other) {
  const auto found = std::find_if(ways_.begin(), ways_.end(),
                                  [&](const Way& way) { return way.link->mine == mine && way.link->other == other; });
  return found == ways_.end() ? nullptr : &*found;
}

// Goes one round further if the current one is over.
bool Barrier::advance(Place& place) {
  if (place.distance >= members_.size) return false;
  const int size = members_.size;
  Way* const to = way(place.rank, (place.rank + place.distance) % size);
  const int before = (place.rank - place.distance + size) % size;
  Way* const from = way(place.rank, before);
  bool moved = false;
  if (!place.notified) {
    place.notified = moved = true;
    if (to != nullptr) with_link(*to->link, [&] { to->link->pair.start(slot_, to->send); });
  }
  if (to != nullptr && !to->send.complete) return moved;
  if (from != nullptr) {
    if (!from->receive.complete) return moved;
  } else {
    // A rank of this process: its progress shows whether it is in this round.
    const auto neighbour =
        std::find_if(places_.begin(), places_.end(), [&](const Place& other) { return other.rank == before; });
    if (neighbour->distance < place.distance || (neighbour->distance == place.distance && !neighbour->notified)) {
      return moved;
    }
  }
  place.distance *= 2;
  place.notified = false;
  return true;
}

bool Barrier::step() {
  for (bool moved = true; moved;) {
    moved = false;
    for (Place& place : places_) moved = advance(place) || moved;
  }
  return std::all_of(places_.begin(), places_.end(),
                     [&](const Place& place) { return place.distance >= members_.size; });
}

std::string Barrier::where(const Link* link) const {
  std::string text;
  for (const Way& way : ways_) {
    if (link != nullptr && way.link != link) continue;
    if (way.receives && !way.receive.complete) {
      text += (text.empty() ? "" : ", ") + way.link->name() + missing(*way.link);
    }
  }
  if (text.empty()) return slot_name(slot_);
  return slot_name(slot_) + (link == nullptr ? " waited for " + text : "");
}

}  // namespace refit::gloo
