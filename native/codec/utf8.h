#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

namespace refit {

bool is_ascii(std::span<const uint8_t> bytes);

// As the Unicode standard has it: no surrogates, nothing past U+10FFFF, no sequence longer than it needs to be.
bool is_utf8(std::span<const uint8_t> bytes);

// Length of valid UTF-8 as a JavaScript string.
size_t utf16_length(std::span<const uint8_t> bytes);

}  // namespace refit
