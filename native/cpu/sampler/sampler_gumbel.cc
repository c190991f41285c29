#include "cpu/sampler/sampler_gumbel.h"

#include <algorithm>
#include <cmath>

#include "core/philox.h"

namespace refit::cpu {
namespace {

// The Gumbel noise for a value of noise_uniform.
float gumbel(float v) { return -std::log(-std::log1p(-v)); }

constexpr float kSmallestNoise = 0x1p-33f;
// Covers the rounding of prob, exp and the scores: a token is skipped only if it is far from winning.
constexpr float kMargin = 1.0f + 1e-3f;

}  // namespace

int sample_gumbel(const float* z, float max, const float* prob, int n, int best, uint64_t seed, int32_t position) {
  const auto word = [&](int token) {
    return sample_noise(seed, static_cast<uint32_t>(position), static_cast<uint32_t>(token / 4)).x[token % 4];
  };
  float score = (z[best] - max) + gumbel(noise_uniform(word(best)));
  // Token i can win only if -log1p(-v) <= exp(z[i] - max - score), and v <= -log1p(-v). The logarithms, and for most
  // groups of four even the noise, are therefore computed only for tokens that can win. This changes no result.
  float reach = std::exp(-score) * kMargin;
  for (int base = 0; base < n; base += 4) {
    const int end = std::min(4, n - base);
    float most = prob[base];
    for (int i = 1; i < end; ++i) most = std::max(most, prob[base + i]);
    if (most * reach < kSmallestNoise) continue;
    const PhiloxBlock noise = sample_noise(seed, static_cast<uint32_t>(position), static_cast<uint32_t>(base / 4));
    for (int i = 0; i < end; ++i) {
      const float v = noise_uniform(noise.x[i]);
      if (v > prob[base + i] * reach) continue;
      const int token = base + i;
      const float s = (z[token] - max) + gumbel(v);
      if (s > score || (s == score && token < best)) {
        score = s;
        best = token;
        reach = std::exp(-score) * kMargin;
      }
    }
  }
  return best;
}

}  // namespace refit::cpu
