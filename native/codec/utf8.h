#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

namespace refit {

bool is_ascii(std::span<const uint8_t> bytes);

// By the definition of the Unicode standard: no surrogates, nothing past U+10FFFF, no overlong sequences.
bool is_utf8(std::span<const uint8_t> bytes);

// Length of valid UTF-8 as a JavaScript string.
size_t utf16_length(std::span<const uint8_t> bytes);

}  // namespace refit
