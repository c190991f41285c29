// Whole messages through a pipe to another process of a test. Throws if the process has ended.
#pragma once
#include <unistd.h>

#include <cstddef>
#include <stdexcept>

namespace refit::test {

inline void send_all(int fd, const void* data, size_t bytes) {
  for (size_t at = 0; at < bytes;) {
    const ssize_t sent = ::write(fd, static_cast<const char*>(data) + at, bytes - at);
    if (sent <= 0) throw std::runtime_error("the other process has gone");
    at += static_cast<size_t>(sent);
  }
}

inline void receive_all(int fd, void* data, size_t bytes) {
  for (size_t at = 0; at < bytes;) {
    const ssize_t got = ::read(fd, static_cast<char*>(data) + at, bytes - at);
    if (got <= 0) throw std::runtime_error("the other process has gone");
    at += static_cast<size_t>(got);
  }
}

}  // namespace refit::test
