#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace refit {

// The change of one tensor in a checkpoint on disk: `size` compressed bytes at `data`, for the bytes [offset, offset +
// bytes) of a file.
struct TensorDelta {
  int fd;
  uint64_t offset, bytes;
  const uint8_t* data;
  uint64_t size;
};

// xor: new xor old, over all bytes. overwrite: u32 count, count u32 positions of bytes, count new bytes; little-endian.
enum class DeltaEncoding { kXor, kOverwrite };
enum class DeltaChecksum { kXxh3, kAdler32 };

// Changes tensors in place, several at once. Returns the checksum of the new bytes of each, in hexadecimal digits.
// Throws std::runtime_error, with the index, at the first that cannot be changed; others may have been changed.
std::vector<std::string> apply_deltas(const std::vector<TensorDelta>& deltas, DeltaEncoding encoding,
                                      DeltaChecksum checksum, int threads);

}  // namespace refit
