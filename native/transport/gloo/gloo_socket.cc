#include "transport/gloo/gloo_socket.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>

#include "core/group.h"

namespace refit::gloo {
namespace {

const sockaddr* as_address(const sockaddr_storage& storage) { return reinterpret_cast<const sockaddr*>(&storage); }

[[noreturn]] void cannot_listen(const std::string& host, const char* call) {
  const int error = errno;
  std::string text = "cannot listen on " + host + ": " + call + ": " + system_text(error);
  if (error == EADDRNOTAVAIL) text += " (it is not an address of this machine)";
  throw GroupError(GroupErrorKind::kRefused, text);
}

}  // namespace

void Fd::reset() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

std::string system_text(int error) { return std::generic_category().message(error); }

std::vector<uint8_t> parse_host(const std::string& host) {
  sockaddr_in v4{};
  sockaddr_in6 v6{};
  const auto bytes = [](const auto& address) {
    const auto* at = reinterpret_cast<const uint8_t*>(&address);
    return std::vector<uint8_t>(at, at + sizeof address);
  };
  if (inet_pton(AF_INET, host.c_str(), &v4.sin_addr) == 1) {
    v4.sin_family = AF_INET;
    return bytes(v4);
  }
  if (inet_pton(AF_INET6, host.c_str(), &v6.sin6_addr) == 1) {
    v6.sin6_family = AF_INET6;
    return bytes(v6);
  }
  throw std::invalid_argument("host: expected an IPv4 or IPv6 address, got \"" + host + "\"");
}

Fd listen_on(std::vector<uint8_t>& socket) {
  sockaddr_storage storage{};
  std::memcpy(&storage, socket.data(), socket.size());
  char name[INET6_ADDRSTRLEN] = {};
  const void* host = storage.ss_family == AF_INET
                         ? static_cast<const void*>(&reinterpret_cast<const sockaddr_in&>(storage).sin_addr)
                         : &reinterpret_cast<const sockaddr_in6&>(storage).sin6_addr;
  inet_ntop(storage.ss_family, host, name, sizeof name);
  Fd fd(::socket(storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd) cannot_listen(name, "socket");
  auto length = static_cast<socklen_t>(socket.size());
  if (::bind(fd.get(), as_address(storage), length) != 0) cannot_listen(name, "bind");
  if (::listen(fd.get(), SOMAXCONN) != 0) cannot_listen(name, "listen");
  if (::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&storage), &length) != 0) cannot_listen(name, "getsockname");
  std::memcpy(socket.data(), &storage, socket.size());
  return fd;
}

int begin_connect(const std::vector<uint8_t>& socket, Fd& out) {
  sockaddr_storage storage{};
  std::memcpy(&storage, socket.data(), socket.size());
  Fd fd(::socket(storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd) return errno;
  while (::connect(fd.get(), as_address(storage), static_cast<socklen_t>(socket.size())) != 0) {
    if (errno == EINPROGRESS) break;
    if (errno != EINTR) return errno;
  }
  out = std::move(fd);
  return 0;
}

int connect_error(const Fd& fd) {
  int error = 0;
  socklen_t length = sizeof error;
  if (::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length) != 0) return errno;
  return error;
}

void set_no_delay(const Fd& fd) {
  const int on = 1;
  ::setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

void close_hard(Fd& fd) {
  if (!fd) return;
  const linger at_once{1, 0};
  ::setsockopt(fd.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
  fd.reset();
}

void close_soft(Fd& fd) {
  if (!fd) return;
  // Unread bytes would make the kernel drop bytes that are still to be sent.
  char dropped[4096];
  while (::recv(fd.get(), dropped, sizeof dropped, MSG_DONTWAIT) > 0) {
  }
  fd.reset();
}

std::string machine_name() {
  char name[256] = {};
  return ::gethostname(name, sizeof name - 1) == 0 ? name : "";
}

}  // namespace refit::gloo
