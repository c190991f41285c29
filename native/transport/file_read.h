// Reads a file at an offset: all bytes, or the reason why not.
#pragma once
#include <cstdint>
#include <string>

namespace refit {

struct ReadResult {
  uint64_t bytes = 0;  // bytes that are in `out` now; fewer than requested: the read failed
  int error = 0;       // errno; 0 with fewer bytes: the file ended
  // False only if `out` is certainly unchanged.
  bool touched = false;

  bool ok(uint64_t wanted) const { return error == 0 && bytes == wanted; }
};

// Calls pread until `bytes` are there, the file ends or an error other than EINTR occurs.
ReadResult read_at(int fd, uint64_t offset, uint8_t* out, uint64_t bytes);

}  // namespace refit
