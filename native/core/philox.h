// Philox4x32-10, the counter-based generator of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011),
// and the Gumbel noise that is computed from it. The noise of a token depends only on (seed, position, token id). There
// is no state, so a sample is the same in any batch, slot and rank count, and after any preemption. Integer arithmetic
// only; device code includes this file too.
#pragma once
#include <cstdint>

#include "core/host_device.h"

namespace refit {

struct PhiloxBlock {
  uint32_t x[4];
};

// All 64 bits of a product. The GPU's compiler would make it of several 64-bit products.
REFIT_HOST_DEVICE inline uint64_t whole_product(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  uint64_t product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
#else
  return static_cast<uint64_t>(a) * b;
#endif
}

REFIT_HOST_DEVICE inline PhiloxBlock philox4x32_10(PhiloxBlock c, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = whole_product(c.x[0], 0xD2511F53u);
    const uint64_t b = whole_product(c.x[2], 0xCD9E8D57u);
    c = PhiloxBlock{{static_cast<uint32_t>(b >> 32) ^ c.x[1] ^ key0, static_cast<uint32_t>(b),
                     static_cast<uint32_t>(a >> 32) ^ c.x[3] ^ key1, static_cast<uint32_t>(a)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return c;
}

// Word i is the noise of token 4 * block + i. `position` is the absolute position of the sampled token.
REFIT_HOST_DEVICE inline PhiloxBlock sample_noise(uint64_t seed, uint32_t position, uint32_t block) {
  return philox4x32_10(PhiloxBlock{{block, position, 0, 0}}, static_cast<uint32_t>(seed),
                       static_cast<uint32_t>(seed >> 32));
}

// A word as a number v in [2^-33, 1 - 2^-24]. The Gumbel noise is -log(-log1p(-v)). Small v give large noise and are
// finely resolved, so tokens of tiny probability are drawn with the right frequency.
REFIT_HOST_DEVICE inline float noise_uniform(uint32_t word) {
  const float v = (static_cast<float>(word) + 0.5f) * 0x1p-32f;
  return v < 1.0f - 0x1p-24f ? v : 1.0f - 0x1p-24f;
}

}  // namespace refit
