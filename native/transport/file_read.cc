#include "transport/file_read.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace refit {
namespace {

// The most that Linux reads in one call.
constexpr uint64_t kMaxRead = 0x7ffff000;

// Errors of the call itself: nothing was read. After any other error (EIO, for example) a file system may have written
// part of the buffer.
bool refused(int error) {
  return error == EBADF || error == EINVAL || error == EISDIR || error == ESPIPE || error == EOVERFLOW;
}

}  // namespace

ReadResult read_at(int fd, uint64_t offset, uint8_t* out, uint64_t bytes) {
  ReadResult result;
  while (result.bytes < bytes) {
    const size_t count = std::min(bytes - result.bytes, kMaxRead);
    const ssize_t got = pread(fd, out + result.bytes, count, static_cast<off_t>(offset + result.bytes));
    if (got < 0) {
      if (errno == EINTR) continue;
      result.error = errno;
      if (!refused(errno)) result.touched = true;
      return result;
    }
    if (got == 0) return result;
    result.bytes += static_cast<uint64_t>(got);
    result.touched = true;
  }
  return result;
}

}  // namespace refit
