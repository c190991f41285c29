#include "transport/gloo/gloo_wire.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <iterator>

#include "core/group.h"

namespace refit::gloo {
namespace {

static_assert(std::endian::native == std::endian::little, "gloo sends its numbers as they lie in memory");

constexpr size_t kAddressBytes = sizeof(sockaddr_storage) + sizeof(int64_t);
constexpr int64_t kNoSequence = -1;
constexpr uint64_t kMaxHostBytes = 4096;

template <typename T>
void append(std::vector<uint8_t>& out, const T& value) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(&value);
  out.insert(out.end(), bytes, bytes + sizeof value);
}

sockaddr_storage storage_of(const std::vector<uint8_t>& socket) {
  sockaddr_storage out{};
  std::memcpy(&out, socket.data(), socket.size());
  return out;
}

[[noreturn]] void refuse(int rank, const std::string& why) {
  throw GroupError(GroupErrorKind::kRefused,
                   "the address that rank " + std::to_string(rank) + " has in the store " + why);
}

}  // namespace

std::string slot_name(uint64_t slot) {
  if (is_message(slot)) return "message " + std::to_string(slot);
  static const char* const kNames[] = {"send",    "gather",    "allgather", "reduce",  "allreduce",
                                       "scatter", "broadcast", "barrier",   "alltoall"};
  const uint64_t prefix = slot >> 56;
  const std::string name = prefix < std::size(kNames) ? kNames[prefix] : "collective of kind " + std::to_string(prefix);
  return name + " " + std::to_string(tag_of(slot));
}

std::vector<uint8_t> encode(const Address& address) {
  std::vector<uint8_t> out;
  append(out, static_cast<uint64_t>(address.host.size()));
  out.insert(out.end(), address.host.begin(), address.host.end());
  append(out, static_cast<uint64_t>(kAddressBytes));
  append(out, storage_of(address.socket));
  append(out, kNoSequence);
  for (const int64_t identifier : address.identifiers) append(out, identifier);
  return out;
}

Address decode(const std::vector<uint8_t>& value, int rank, int size) {
  size_t at = 0;
  const auto number = [&]() -> uint64_t {
    uint64_t out = ~uint64_t{0};
    if (value.size() - at >= sizeof out) std::memcpy(&out, value.data() + at, sizeof out);
    at += std::min(sizeof out, value.size() - at);
    return out;
  };
  const auto shape = [&] {
    return " (" + std::to_string(value.size()) + " bytes, in a group of " + std::to_string(size) + ")";
  };
  // Before torch 2.1 the value had one address for each pair, and nothing before them.
  if (size > 1 && value.size() == kAddressBytes * static_cast<size_t>(size - 1)) {
    refuse(rank, "is of an old gloo, from before torch 2.1" + shape() + ": use torch 2.1 or newer on that side");
  }
  Address out;
  const uint64_t host_bytes = number();
  if (host_bytes > kMaxHostBytes || host_bytes > value.size() - at) {
    refuse(rank, "is not one of torch's gloo over TCP" + shape() +
                     ": does every rank use backend gloo, and torch 2.1 or newer?");
  }
  out.host.assign(value.begin() + static_cast<ptrdiff_t>(at), value.begin() + static_cast<ptrdiff_t>(at + host_bytes));
  at += host_bytes;
  if (number() != kAddressBytes || value.size() - at < kAddressBytes) {
    refuse(rank, "is of a gloo whose layout is unknown" + shape() + ": torch 2.1 to 2.13 over TCP is supported");
  }
  sockaddr_storage socket;
  std::memcpy(&socket, value.data() + at, sizeof socket);
  at += kAddressBytes;
  if (socket.ss_family != AF_INET && socket.ss_family != AF_INET6) {
    refuse(rank, "is of address family " + std::to_string(socket.ss_family) + ": IPv4 and IPv6 are supported");
  }
  const auto* bytes = reinterpret_cast<const uint8_t*>(&socket);
  out.socket.assign(bytes, bytes + (socket.ss_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6)));
  const size_t rest = value.size() - at;
  if (rest != 0 && rest != sizeof(int64_t) * static_cast<size_t>(size)) {
    refuse(rank, "is of a group of another size" + shape() + ": it has " + std::to_string(rest / sizeof(int64_t)) +
                     " identifiers");
  }
  out.identifiers.resize(rest / sizeof(int64_t));
  if (rest != 0) std::memcpy(out.identifiers.data(), value.data() + at, rest);
  return out;
}

bool connects(const Address& mine, const Address& other) {
  const sockaddr_storage a = storage_of(mine.socket);
  const sockaddr_storage b = storage_of(other.socket);
  int order = 0;
  int port_a = 0, port_b = 0;  // as they are in memory, which is big-endian: gloo compares them in this form
  if (a.ss_family == AF_INET) {
    const auto& x = reinterpret_cast<const sockaddr_in&>(a);
    const auto& y = reinterpret_cast<const sockaddr_in&>(b);
    order = std::memcmp(&x.sin_addr, &y.sin_addr, sizeof x.sin_addr);
    port_a = x.sin_port;
    port_b = y.sin_port;
  } else {
    const auto& x = reinterpret_cast<const sockaddr_in6&>(a);
    const auto& y = reinterpret_cast<const sockaddr_in6&>(b);
    order = std::memcmp(&x.sin6_addr, &y.sin6_addr, sizeof x.sin6_addr);
    port_a = x.sin6_port;
    port_b = y.sin6_port;
  }
  return order != 0 ? order > 0 : port_a > port_b;
}

std::string text(const std::vector<uint8_t>& socket) {
  if (socket.empty()) return "unknown";
  const sockaddr_storage ss = storage_of(socket);
  char host[INET6_ADDRSTRLEN] = {};
  if (ss.ss_family == AF_INET) {
    const auto& in = reinterpret_cast<const sockaddr_in&>(ss);
    inet_ntop(AF_INET, &in.sin_addr, host, sizeof host);
    return std::string(host) + ":" + std::to_string(ntohs(in.sin_port));
  }
  const auto& in = reinterpret_cast<const sockaddr_in6&>(ss);
  inet_ntop(AF_INET6, &in.sin6_addr, host, sizeof host);
  return "[" + std::string(host) + "]:" + std::to_string(ntohs(in.sin6_port));
}

bool is_loopback(const std::vector<uint8_t>& socket) {
  const sockaddr_storage ss = storage_of(socket);
  if (ss.ss_family == AF_INET) {
    return (ntohl(reinterpret_cast<const sockaddr_in&>(ss).sin_addr.s_addr) >> 24) == 127;
  }
  return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(ss).sin6_addr);
}

// Relative to the root, rank v receives from v without its highest bit, and sends to v with one more bit above that.
TreePlace tree_place(int rank, int root, int size) {
  const auto v = static_cast<unsigned>((rank - root + size) % size);
  const auto actual = [&](unsigned relative) {
    return static_cast<int>((relative + static_cast<unsigned>(root)) % static_cast<unsigned>(size));
  };
  TreePlace out;
  const unsigned above = std::bit_width(v);
  if (v != 0) out.parent = actual(v ^ (1u << (above - 1)));
  for (unsigned bit = above; (v | (1u << bit)) < static_cast<unsigned>(size); bit++)
    out.children.push_back(actual(v | (1u << bit)));
  return out;
}

int tree_depth(int rank, int root, int size) {
  return std::popcount(static_cast<unsigned>((rank - root + size) % size));
}

}  // namespace refit::gloo
