// Shared by tests of the sampler: one row through the CPU's sampler, and brute force in double precision.
#pragma once
#include <limits>
#include <string>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/sampler/sampler.h"
#include "test/forward_reference.h"

namespace refit::test {

using Row = BatchBuilder::Row;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// One row with the given logits. `position` is the position of the sampled token.
inline StepResult sample(const std::vector<float>& logits, const Row& row, int position = 7,
                         const std::string& isa = "") {
  BatchBuilder b;
  b.row(row);
  cpu::Sampler sampler(cpu::kernels(isa), static_cast<int>(logits.size()), 1);
  StepResult result;
  const StepBatch batch = b.view();
  sampler.begin(batch, result);
  std::vector<float> z = logits;
  sampler.row(0, position, z.data(), 0);
  sampler.end();
  return result;
}

inline std::vector<float> random_logits(std::mt19937& rng, int n, double sd, bool ties = false) {
  std::normal_distribution<double> normal(0, sd);
  std::vector<float> z(n);
  for (float& x : z) x = static_cast<float>(ties ? std::round(normal(rng)) : normal(rng));
  return z;
}

inline std::vector<double> softmax(const std::vector<double>& z) {
  double max = -1e300, sum = 0;
  for (const double x : z) max = std::max(max, x);
  std::vector<double> p;
  for (const double x : z) sum += std::exp(x - max);
  for (const double x : z) p.push_back(std::exp(x - max) / sum);
  return p;
}

inline std::vector<double> widen(const std::vector<float>& z, double temperature = 1) {
  std::vector<double> out;
  for (const float x : z) out.push_back(x / temperature);
  return out;
}

inline std::vector<int> brute_order(const std::vector<float>& z) {
  std::vector<int> order(z.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return z[a] > z[b]; });
  return order;
}

}  // namespace refit::test
