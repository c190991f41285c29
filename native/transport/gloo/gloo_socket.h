// Descriptors and sockets, as the gloo transport uses them: none of them ever blocks.
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

// What the system said, for messages: `Connection refused`.
std::string system_text(int error);

// sockaddr_in or sockaddr_in6 of a literal address with port 0. Throws std::invalid_argument.
std::vector<uint8_t> parse_host(const std::string& host);
// Listens on a free port; `socket` becomes where. Throws GroupError(kRefused).
Fd listen_on(std::vector<uint8_t>& socket);
// Begins to connect. 0, or errno.
int begin_connect(const std::vector<uint8_t>& socket, Fd& out);
// Of a connection that was begun, when it can be written to: 0, or errno.
int connect_error(const Fd& fd);
// Small messages leave at once.
void set_no_delay(const Fd& fd);
// Closes so that the other side sees an error at once, whatever is under way.
void close_hard(Fd& fd);
// Closes so that what was written arrives.
void close_soft(Fd& fd);
std::string machine_name();

}  // namespace refit::gloo
