#include "codec/utf8.h"

namespace refit {

bool is_ascii(std::span<const uint8_t> bytes) {
  uint8_t all = 0;
  for (const uint8_t byte : bytes) all |= byte;
  return all < 0x80;
}

bool is_utf8(std::span<const uint8_t> bytes) {
  for (size_t at = 0; at < bytes.size();) {
    const uint8_t lead = bytes[at++];
    if (lead < 0x80) continue;
    const size_t more = lead >= 0xc2 && lead <= 0xdf   ? 1
                        : (lead & 0xf0) == 0xe0        ? 2
                        : lead >= 0xf0 && lead <= 0xf4 ? 3
                                                       : 0;
    if (more == 0 || more > bytes.size() - at) return false;
    // The second byte rules out overlong forms, surrogates and characters past U+10FFFF.
    const uint8_t low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
    const uint8_t high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
    if (bytes[at] < low || bytes[at] > high) return false;
    for (size_t next = 1; next < more; next++) {
      if ((bytes[at + next] & 0xc0) != 0x80) return false;
    }
    at += more;
  }
  return true;
}

size_t utf16_length(std::span<const uint8_t> bytes) {
  size_t units = 0;
  // A character of four bytes is a pair of surrogates.
  for (const uint8_t byte : bytes) units += (byte & 0xc0) == 0x80 ? 0 : byte >= 0xf0 ? 2 : 1;
  return units;
}

}  // namespace refit
