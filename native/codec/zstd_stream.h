#pragma once

#include <cstddef>
#include <cstdint>

namespace refit {

// What a Zstandard frame (RFC 8878) holds, in pieces. By the system's libzstd.so.1, which is opened at the first use.
// Throws std::runtime_error: it is not there, the frame is broken.
class ZstdStream {
 public:
  ZstdStream(const uint8_t* data, size_t size);
  ~ZstdStream();
  ZstdStream(const ZstdStream&) = delete;
  ZstdStream& operator=(const ZstdStream&) = delete;

  // As many bytes as there are, at most `size`; fewer only at the end.
  size_t read(uint8_t* out, size_t size);

 private:
  void* stream_;
  const uint8_t* data_;
  size_t size_;
  size_t at_ = 0;
};

}  // namespace refit
