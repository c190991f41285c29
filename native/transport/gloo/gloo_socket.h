// Descriptors and sockets of the gloo transport. None of them ever blocks.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace refit::gloo {

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  ~Fd() { reset(); }
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset();

 private:
  int fd_ = -1;
};

// The system's text for an error: `Connection refused`.
std::string system_text(int error);

// sockaddr_in or sockaddr_in6 of a literal address with port 0. Throws std::invalid_argument.
std::vector<uint8_t> parse_host(const std::string& host);
// Listens on a free port and writes its address to `socket`. Throws GroupError (kRefused).
Fd listen_on(std::vector<uint8_t>& socket);
// Begins to connect. Returns 0 or errno.
int begin_connect(const std::vector<uint8_t>& socket, Fd& out);
// The result of a connection that was begun, once it is writable: 0 or errno.
int connect_error(const Fd& fd);
// Sends small messages at once.
void set_no_delay(const Fd& fd);
// Closes so that the other side sees an error at once, even with pending transfers.
void close_hard(Fd& fd);
// Closes so that written bytes still arrive.
void close_soft(Fd& fd);
std::string machine_name();

}  // namespace refit::gloo
