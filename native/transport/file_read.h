// Reading a file at an offset, whole or with a reason.
#pragma once
#include <cstdint>
#include <string>

namespace refit {

struct ReadResult {
  uint64_t bytes = 0;  // that are in `out` now; fewer than asked for means it failed
  int error = 0;       // errno; 0 with fewer bytes: the file ended
  // False only where `out` is certain to be as it was.
  bool touched = false;

  bool ok(uint64_t wanted) const { return error == 0 && bytes == wanted; }
};

// pread until `bytes` are there, the file ends or an error other than EINTR comes.
ReadResult read_at(int fd, uint64_t offset, uint8_t* out, uint64_t bytes);

}  // namespace refit
