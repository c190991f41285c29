#include "cpu/sampler/sampler_mask.h"

#include <algorithm>
#include <array>

#include "cpu/sampler/sampler_order.h"

namespace refit::cpu {
namespace {

// Tokens fall into bins by the leading bits of their order key. Whole bins are kept or dropped; only the bin where the
// limit lies is sorted.
constexpr int kShift = 20;
constexpr int kBins = 1 << (32 - kShift);

int bin_of(float z) { return static_cast<int>(order_key(z) >> kShift); }

// Drops all below `bin`; collects the tokens of `bin` that are still there, best first.
void split_at(int bin, const float* z, float* prob, int n, std::vector<int32_t>& order) {
  order.clear();
  for (int i = 0; i < n; ++i) {
    const int b = bin_of(z[i]);
    if (b < bin) prob[i] = 0.0f;
    if (b == bin && prob[i] > 0.0f) order.push_back(i);
  }
  std::sort(order.begin(), order.end(), TokenOrder{z});
}

void drop_from(size_t first, float* prob, const std::vector<int32_t>& order) {
  for (size_t i = first; i < order.size(); ++i) prob[order[i]] = 0.0f;
}

}  // namespace

void keep_top_k(const float* z, float* prob, int n, int k, std::vector<int32_t>& order) {
  if (k <= 0 || k >= n) return;
  std::array<int32_t, kBins> counts{};
  for (int i = 0; i < n; ++i) ++counts[bin_of(z[i])];
  int bin = kBins - 1, above = 0;
  while (above + counts[bin] < k) above += counts[bin--];
  split_at(bin, z, prob, n, order);
  drop_from(std::min<size_t>(order.size(), k - above), prob, order);
}

void keep_top_p(const float* z, float* prob, int n, float p, std::vector<int32_t>& order) {
  if (p >= 1.0f) return;
  std::array<double, kBins> mass{};
  double total = 0.0;
  for (int i = 0; i < n; ++i) {
    if (prob[i] > 0.0f) mass[bin_of(z[i])] += prob[i];
  }
  for (const double m : mass) total += m;
  const double limit = static_cast<double>(p) * total;
  int bin = kBins - 1;
  double before = 0.0;
  // Stops in the first bin whose end reaches the limit; the best token's bin at the earliest.
  while (bin > 0 && (mass[bin] == 0.0 || before + mass[bin] < limit)) before += mass[bin--];
  split_at(bin, z, prob, n, order);
  size_t kept = 0;
  for (; kept < order.size(); ++kept) {
    if (before >= limit && !(kept == 0 && before == 0.0)) break;
    before += prob[order[kept]];
  }
  drop_from(kept, prob, order);
}

void keep_min_p(float* prob, int n, float min_p) {
  if (min_p <= 0.0f) return;
  for (int i = 0; i < n; ++i) prob[i] = prob[i] >= min_p ? prob[i] : 0.0f;
}

}  // namespace refit::cpu
