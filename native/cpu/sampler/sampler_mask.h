// Top-k, top-p and min-p: exact, ties kept by lower token id.
#pragma once
#include <cstdint>
#include <vector>

namespace refit::cpu {

// prob[i] = exp(z[i] - max z), not normalised; the prob of a dropped token becomes 0. z has a finite maximum and no
// NaN. order: scratch.

// Keeps the k best.
void keep_top_k(const float* z, float* prob, int n, int k, std::vector<int32_t>& order);
// Keeps the best tokens until their sum reaches p of the remaining sum of prob: a token stays if the sum of the tokens
// before it is below p. The best token always stays.
void keep_top_p(const float* z, float* prob, int n, float p, std::vector<int32_t>& order);
// Keeps tokens at least min_p times as likely as the most likely one.
void keep_min_p(float* prob, int n, float min_p);

}  // namespace refit::cpu
