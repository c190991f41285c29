#pragma once
#include <cuda_runtime_api.h>

#include <string>

namespace refit::cuda {

// The form that nvidia-smi prints: GPU-01234567-89ab-cdef-0123-456789abcdef.
inline std::string uuid_text(const cudaUUID_t& uuid) {
  static const char* const digits = "0123456789abcdef";
  std::string text = "GPU";
  for (int i = 0; i < 16; i++) {
    if (i == 0 || i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    const unsigned byte = static_cast<unsigned char>(uuid.bytes[i]);
    text += digits[byte >> 4];
    text += digits[byte & 15];
  }
  return text;
}

}  // namespace refit::cuda
