#include "transport/gloo/gloo_mesh.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "core/group.h"

namespace refit::gloo {
namespace {

using Clock = std::chrono::steady_clock;

// A rank listens before it publishes its address, so a refusal is final, unless a queue overflows for a moment.
constexpr int kMaxTries = 4;
constexpr auto kFirstPause = std::chrono::milliseconds(50);
// Maximum number of connections that have not sent their number: strangers. The oldest is closed.
constexpr size_t kMaxCallers = 1024;
constexpr int kMaxEvents = 64;

[[noreturn]] void no_resources(const char* call) {
  throw GroupError(GroupErrorKind::kRefused,
                   std::string("a gloo group cannot be made: ") + call + ": " + system_text(errno));
}

int milliseconds_until(Clock::time_point until) {
  const auto left =
      std::chrono::ceil<std::chrono::milliseconds>(std::max(until, Clock::time_point{}) - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 3600 * 1000));
}

}  // namespace

std::string Link::name() const {
  return "rank " + std::to_string(other) + " at " + text(address) + (host.empty() ? "" : " (" + host + ")");
}

Mesh::Mesh(int size, const std::vector<int>& ranks, const std::string& host)
    : size_(size), ranks_(ranks), epoll_(::epoll_create1(EPOLL_CLOEXEC)) {
  if (!epoll_) no_resources("epoll_create1");
  wake_ = Fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_) no_resources("eventfd");
  watch(wake_.get(), Kind::kWake, 0, false);
  for (size_t k = 0; k < ranks.size(); k++) {
    Address address;
    address.host = machine_name();
    address.socket = parse_host(host);
    listeners_.push_back(listen_on(address.socket));
    watch(listeners_.back().get(), Kind::kListener, k, false);
    // Each rank sends its own number. A torch that connects lazily, or that is configured to use ranks as numbers,
    // sends the rank; any other torch sends the number that it finds here.
    for (int other = 0; other < size; other++) address.identifiers.push_back(other);
    addresses_.push_back(std::move(address));
  }
}

Mesh::~Mesh() { close(true); }

void Mesh::watch(int fd, Kind kind, size_t index, bool output, bool again) {
  epoll_event event{};
  event.events = EPOLLIN | (output ? EPOLLOUT : 0u);
  event.data.u64 = (static_cast<uint64_t>(kind) << 32) | index;
  if (::epoll_ctl(epoll_.get(), again ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, fd, &event) != 0) no_resources("epoll_ctl");
}

size_t Mesh::index_of(int mine, int other) const {
  const auto row = static_cast<size_t>(std::find(ranks_.begin(), ranks_.end(), mine) - ranks_.begin());
  const auto before = std::count_if(ranks_.begin(), ranks_.end(), [&](int rank) { return rank < other; });
  return row * (static_cast<size_t>(size_) - ranks_.size()) + static_cast<size_t>(other - before);
}

void Mesh::meet(const std::vector<std::vector<uint8_t>>& peers) {
  const auto is_mine = [&](int rank) { return std::find(ranks_.begin(), ranks_.end(), rank) != ranks_.end(); };
  std::vector<Address> others(static_cast<size_t>(size_));
  for (int rank = 0; rank < size_; rank++) {
    if (is_mine(rank)) continue;
    others[rank] = decode(peers[rank], rank, size_);
    if (others[rank].socket.size() != addresses_[0].socket.size()) {
      throw GroupError(GroupErrorKind::kRefused,
                       "rank " + std::to_string(rank) + " listens on " + text(others[rank].socket) + ", this side on " +
                           text(addresses_[0].socket) +
                           ": gloo needs all ranks to have addresses of one kind, IPv4 or IPv6");
    }
  }
  for (size_t k = 0; k < ranks_.size(); k++) {
    for (int rank = 0; rank < size_; rank++) {
      if (is_mine(rank)) continue;
      Link& link = links_.emplace_back();
      link.mine = ranks_[k];
      link.other = rank;
      link.connects = connects(addresses_[k], others[rank]);
      link.lazy = others[rank].lazy();
      link.host = others[rank].host;
      link.address = others[rank].socket;
      link.next_try = Clock::now();
      // The number by which the other side identifies this rank.
      link.identifier = others[rank].lazy() ? ranks_[k] : others[rank].identifiers[static_cast<size_t>(ranks_[k])];
    }
  }
  down_ = links_.size();
}

bool Mesh::met() const {
  return std::all_of(links_.begin(), links_.end(), [](const Link& link) {
    return link.pair.connected() || link.pair.has_failed() || (link.lazy && !link.connects);
  });
}

Link* Mesh::link(int mine, int other) {
  if (std::find(ranks_.begin(), ranks_.end(), other) != ranks_.end()) return nullptr;
  return &links_[index_of(mine, other)];
}

void Mesh::poll(Clock::time_point until) {
  for (Link& link : links_) {
    if (!link.connects && !link.pair.connected()) continue;
    if (link.connects && !link.connecting && !link.pair.connected() && !link.pair.has_failed()) {
      if (link.next_try > Clock::now()) {
        until = std::min(until, link.next_try);
      } else {
        begin(link);
      }
    }
    try {
      // No more bytes may come then.
      if (link.pair.write()) until = Clock::time_point::min();
    } catch (const PairFault& fault) {
      throw LinkFault{&link, fault.what};
    }
    if (link.pair.connected() && link.pair.has_output() != link.pair.watched_output) {
      link.pair.watched_output = link.pair.has_output();
      watch(link.pair.fd(), Kind::kLink, index_of(link), link.pair.watched_output, true);
    }
  }
  epoll_event events[kMaxEvents];
  const int count = ::epoll_wait(epoll_.get(), events, kMaxEvents, milliseconds_until(until));
  if (count < 0 && errno != EINTR) throw LinkFault{nullptr, "epoll_wait: " + system_text(errno)};
  for (int i = 0; i < count; i++) {
    const auto kind = static_cast<Kind>(events[i].data.u64 >> 32);
    const auto index = static_cast<uint32_t>(events[i].data.u64);
    switch (kind) {
      case Kind::kWake:
        break;
      case Kind::kListener:
        answer(index);
        break;
      case Kind::kCaller:
        hear(index);
        break;
      case Kind::kLink:
        serve(links_[index], events[i].events);
        break;
    }
  }
}

void Mesh::serve(Link& link, uint32_t events) {
  if (link.connecting) {
    // Errors, too: the socket reports which.
    if ((events & (EPOLLOUT | EPOLLERR | EPOLLHUP)) != 0) connected(link);
    return;
  }
  try {
    if ((events & EPOLLOUT) != 0) link.pair.write();
    if ((events & ~static_cast<uint32_t>(EPOLLOUT)) != 0) link.pair.read();
  } catch (const PairFault& fault) {
    throw LinkFault{&link, fault.what};
  }
}

void Mesh::begin(Link& link) {
  link.tries++;
  const int error = begin_connect(link.address, link.connecting);
  if (error != 0) return retry(link, error);
  watch(link.connecting.get(), Kind::kLink, index_of(link), true);
}

void Mesh::connected(Link& link) {
  int error = connect_error(link.connecting);
  if (error == 0) {
    // Eight bytes fit into the buffer of a new connection.
    const ssize_t sent = ::send(link.connecting.get(), &link.identifier, sizeof link.identifier, MSG_NOSIGNAL);
    if (sent == static_cast<ssize_t>(sizeof link.identifier)) return up(link, std::move(link.connecting));
    error = sent < 0 ? errno : EPIPE;
  }
  retry(link, error);
}

void Mesh::retry(Link& link, int error) {
  link.connecting.reset();
  if (link.tries < kMaxTries && error != EMFILE && error != ENFILE) {
    link.next_try = Clock::now() + kFirstPause * (1 << link.tries);
    return;
  }
  std::string what = "cannot be connected to: " + system_text(error) + " (" + std::to_string(link.tries) + " tries)";
  if (is_loopback(link.address) && !is_loopback(addresses_[0].socket)) {
    what +=
        "; it has published an address of its own loopback: set GLOO_SOCKET_IFNAME there, or let its host name "
        "resolve to an address that others reach";
  }
  throw LinkFault{&link, what};
}

void Mesh::up(Link& link, Fd fd) {
  // epoll watches an accepted connection as a caller, and a connection of ours as a link that writes.
  link.pair.attach(std::move(fd));
  watch(link.pair.fd(), Kind::kLink, index_of(link), false, true);
  if (--down_ > 0) return;
  // No other rank will come.
  listeners_.clear();
  callers_.clear();
}

void Mesh::answer(size_t listener) {
  while (listener < listeners_.size()) {
    Fd fd(::accept4(listeners_[listener].get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!fd) {
      if (errno == EAGAIN || errno == EWOULDBLOCK) return;
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
        throw LinkFault{nullptr, "a connection cannot be taken: " + system_text(errno)};
      }
      continue;  // that caller has left already
    }
    if (callers_.size() >= kMaxCallers) callers_.erase(callers_.begin());
    const uint32_t id = next_caller_++;
    watch(fd.get(), Kind::kCaller, id, false);
    Caller& caller = callers_[id];
    caller.fd = std::move(fd);
    caller.listener = listener;
  }
}

void Mesh::hear(uint32_t id) {
  const auto found = callers_.find(id);
  if (found == callers_.end()) return;
  Caller& caller = found->second;
  // Reads no byte after the number: the pair reads those.
  const ssize_t got =
      ::recv(caller.fd.get(), caller.number + caller.bytes, sizeof caller.number - caller.bytes, MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
  if (got <= 0) {
    callers_.erase(found);
    return;
  }
  caller.bytes += static_cast<size_t>(got);
  if (caller.bytes < sizeof caller.number) return;
  int64_t rank = -1;
  std::memcpy(&rank, caller.number, sizeof rank);
  Fd fd = std::move(caller.fd);
  const int mine = ranks_[caller.listener];
  callers_.erase(found);
  if (rank < 0 || rank >= size_ || links_.empty()) return;
  Link* const link = this->link(mine, static_cast<int>(rank));
  // A stranger, or a rank that connects twice: close it.
  if (link == nullptr || link->connects || link->pair.connected() || link->pair.has_failed()) return;
  up(*link, std::move(fd));
}

void Mesh::wake() noexcept {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof one);
}

void Mesh::close(bool hard) {
  listeners_.clear();
  callers_.clear();
  for (Link& link : links_) {
    link.connecting.reset();
    link.pair.close(hard);
  }
}

}  // namespace refit::gloo
