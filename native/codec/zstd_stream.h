#pragma once

#include <cstddef>
#include <cstdint>

namespace refit {

// Decompresses Zstandard frames (RFC 8878) in pieces, with the system's libzstd.so.1, which is opened at the first use.
// Throws std::runtime_error if the library is missing or a frame is broken.
class ZstdStream {
 public:
  ZstdStream(const uint8_t* data, size_t size);
  ~ZstdStream();
  ZstdStream(const ZstdStream&) = delete;
  ZstdStream& operator=(const ZstdStream&) = delete;

  // Reads up to `size` bytes and returns how many; fewer only at the end.
  size_t read(uint8_t* out, size_t size);

 private:
  void* stream_;
  const uint8_t* data_;
  size_t size_;
  size_t at_ = 0;
};

}  // namespace refit
