// The only order of tokens: larger logits first, equal ones (+0 and -0 too) by lower id, NaN last.
#pragma once
#include <bit>
#include <cstdint>
#include <vector>

namespace refit::cpu {

// A key with the order of the floats; NaN has key 0.
inline uint32_t order_key(float z) {
  if (z != z) return 0;
  const uint32_t u = std::bit_cast<uint32_t>(z + 0.0f);
  return (u & 0x80000000u) != 0 ? ~u : u | 0x80000000u;
}

struct TokenOrder {
  const float* z;
  bool operator()(int32_t a, int32_t b) const {
    const uint32_t ka = order_key(z[a]), kb = order_key(z[b]);
    return ka != kb ? ka > kb : a < b;
  }
};

// The best token.
int argmax(const float* z, int n);
// Puts the best n of vocab tokens, in order, at the front of `order` (which is resized to vocab).
void best_tokens(const float* z, int vocab, int n, std::vector<int32_t>& order);

}  // namespace refit::cpu
