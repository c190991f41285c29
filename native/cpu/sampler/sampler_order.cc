#include "cpu/sampler/sampler_order.h"

#include <algorithm>
#include <numeric>

namespace refit::cpu {

int argmax(const float* z, int n) {
  int best = 0;
  for (int i = 1; i < n; ++i) {
    if (z[i] > z[best] || (z[best] != z[best] && z[i] == z[i])) best = i;
  }
  return best;
}

void best_tokens(const float* z, int vocab, int n, std::vector<int32_t>& order) {
  order.resize(vocab);
  std::iota(order.begin(), order.end(), 0);
  std::partial_sort(order.begin(), order.begin() + n, order.end(), TokenOrder{z});
}

}  // namespace refit::cpu
