// Gumbel-max sampling: argmax of z - max + noise is a draw from softmax(z).
#pragma once
#include <cstdint>

namespace refit::cpu {

// Draws from the tokens with prob > 0. prob[i] = exp(z[i] - max), 0 for dropped tokens. `best` is the best token, which
// is never dropped. Of equal tokens the lower id wins.
int sample_gumbel(const float* z, float max, const float* prob, int n, int best, uint64_t seed, int32_t position);

}  // namespace refit::cpu
