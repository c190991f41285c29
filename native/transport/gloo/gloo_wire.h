// The wire format of gloo (Facebook, Inc. and contributors; github.com/pytorch/gloo, its TCP transport) for broadcast
// and barrier, as torch 2.1 and newer use it. Numbers are in the byte order of the machine: little-endian.
//
// A transfer between two ranks has a slot, which names the collective. The receiver sends kRecvReady{slot, length}, the
// sender kSendReady{slot, length}. When the sender has received kRecvReady, it sends kSend{slot, length} and the bytes.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace refit::gloo {

enum Opcode : uint64_t { kSendToBuffer = 0, kSend = 1, kSendReady = 2, kRecvReady = 3 };

struct Header {
  uint64_t bytes = sizeof(Header);  // of the whole message
  uint64_t opcode = 0;
  uint64_t slot = 0;
  uint64_t offset = 0;  // only for kSendToBuffer, which torch's collectives never send
  uint64_t length = 0;
  uint64_t remote_offset = 0;
};
static_assert(sizeof(Header) == 48);

enum Prefix : uint8_t { kBroadcast = 6, kBarrier = 7 };

// `tag`: torch's count of the group's collectives, from 0.
constexpr uint64_t make_slot(Prefix prefix, uint32_t tag) { return (uint64_t{prefix} << 56) | (uint64_t{tag} << 24); }
constexpr uint32_t tag_of(uint64_t slot) { return static_cast<uint32_t>(slot >> 24); }
// torch's send and recv use their tag as the slot, without a prefix.
constexpr bool is_message(uint64_t slot) { return slot >> 56 == 0; }
// For messages: `broadcast 17`, `allreduce 3`, `message 5`.
std::string slot_name(uint64_t slot);

// The value that each rank publishes in the store. The other ranks need it to connect.
struct Address {
  std::string host;             // the machine's name
  std::vector<uint8_t> socket;  // its listening address: sockaddr_in or sockaddr_in6
  // The number that each other rank sends when it connects, by rank; empty: the other rank's own number.
  std::vector<int64_t> identifiers;
  // The rank connects, or accepts, only when it has something to send or to receive.
  bool lazy() const { return identifiers.empty(); }
};

std::vector<uint8_t> encode(const Address& address);
// Throws GroupError (kRefused) with the reason for a value of another format; `rank` is the rank that published it.
Address decode(const std::vector<uint8_t>& value, int rank, int size);

// One end of a pair connects and the other listens: true if `mine` connects.
bool connects(const Address& mine, const Address& other);
// `10.0.0.1:4321` or `[fd00::1]:4321`.
std::string text(const std::vector<uint8_t>& socket);
bool is_loopback(const std::vector<uint8_t>& socket);

// The peers of one rank in a broadcast from `root` along a binomial tree: the rank that it receives from (none for the
// root) and those that it then sends to, in order. The order of the bits is gloo's: rank distance 1 first.
struct TreePlace {
  std::optional<int> parent;
  std::vector<int> children;
};
TreePlace tree_place(int rank, int root, int size);
// Number of transfers between the root and the rank.
int tree_depth(int rank, int root, int size);

}  // namespace refit::gloo
