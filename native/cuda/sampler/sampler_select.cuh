// Selects a row's best k tokens, or the best tokens until their probabilities reach a sum: exact, one block per row.
//
// Tokens are counted in bins; then only the tokens of the bin that contains the limit are counted again in finer bins
// (a radix select), until there are few enough to sort. Probabilities are added as integers, so the order of the
// threads does not matter.
#pragma once
#include "cuda/sampler/sampler_row.cuh"

namespace refit::cuda {

constexpr int kSelectThreads = 1024, kSelectBins = 2048, kSelectList = 2048;

struct SelectShared {
  uint32_t counts[kSelectBins];
  uint64_t weights[kSelectBins];
  Composite list[kSelectList];
  uint64_t warps[kSelectThreads / 32];
  uint64_t before, weight;  // of the bin that was found
  uint32_t digit, count, listed;
};

// exp(z - max) in steps of 2^-45: the sum of 2^18 of them still fits.
__device__ inline uint64_t fixed_prob(float prob) { return __double2ull_rn(static_cast<double>(prob) * 0x1p45); }

// fn(token, logit) of every token; all threads of the block. Loads are issued four at a time.
template <class Fn>
__device__ void for_tokens(const Logits& z, Fn fn) {
  constexpr int kStride = 4 * kSelectThreads, kBatch = 4;
  for (int base = 4 * static_cast<int>(threadIdx.x); base < z.vocab; base += kBatch * kStride) {
    float4 loaded[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (base + b * kStride < z.vocab) loaded[b] = z.four(base + b * kStride);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int i = base + b * kStride;
      if (i >= z.vocab) break;
      const float4 f = z.scaled(loaded[b]);
      const float v[4] = {f.x, f.y, f.z, f.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (i + j < z.vocab) fn(i + j, v[j]);
      }
    }
  }
}

// Sum over the threads before this one; total: of all. All threads, none of them in s.warps before.
__device__ inline uint64_t exclusive_sum(uint64_t x, SelectShared& s, uint64_t& total) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  uint64_t sum = x;
  for (int step = 1; step < 32; step *= 2) {
    const uint64_t left = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += left;
  }
  if (lane == 31) s.warps[warp] = sum;
  __syncthreads();
  uint64_t before = 0;
  total = 0;
  for (int w = 0; w < kSelectThreads / 32; ++w) {
    if (w == warp) before = total;
    total += s.warps[w];
  }
  __syncthreads();
  return before + sum - x;
}

// Sorts the first `count` of the list, the largest first; bitonic (Batcher, "Sorting networks and their applications",
// 1968). All threads.
__device__ inline void sort_list(SelectShared& s, uint32_t count) {
  uint32_t n = 1;
  while (n < count) n *= 2;
  for (uint32_t i = count + threadIdx.x; i < n; i += kSelectThreads) s.list[i] = 0;
  __syncthreads();
  for (uint32_t size = 2; size <= n; size *= 2) {
    for (uint32_t step = size / 2; step > 0; step /= 2) {
      for (uint32_t i = threadIdx.x; i < n / 2; i += kSelectThreads) {
        const uint32_t a = 2 * i - (i & (step - 1)), b = a + step;
        const Composite x = s.list[a], y = s.list[b];
        const bool descending = (a & size) == 0;
        if ((x < y) == descending) s.list[a] = y, s.list[b] = x;
      }
      __syncthreads();
    }
  }
}

// Collects the tokens that pass into the list (at most kSelectList), sorted. All threads; returns their number.
template <class Pass>
__device__ uint32_t collect(const Logits& z, SelectShared& s, Pass pass) {
  if (threadIdx.x == 0) s.listed = 0;
  __syncthreads();
  for_tokens(z, [&](int token, float x) {
    const Composite c = composite(x, token);
    if (pass(c, x)) s.list[atomicAdd(&s.listed, 1u)] = c;
  });
  __syncthreads();
  const uint32_t count = s.listed;
  sort_list(s, count);
  return count;
}

struct BinsByCount {
  static constexpr bool kWeighted = false;
  uint64_t k;
  __device__ uint64_t weight(float) const { return 1; }
  __device__ uint64_t target(uint64_t) const { return k; }
};
struct BinsByProb {
  static constexpr bool kWeighted = true;
  float p, max;
  __device__ uint64_t weight(float z) const { return fixed_prob(expf(z - max)); }
  // The best token always stays.
  __device__ uint64_t target(uint64_t total) const {
    const uint64_t limit = __double2ull_ru(static_cast<double>(p) * static_cast<double>(total));
    return limit > 1 ? limit : 1;
  }
};

// Finds the bin, from the last one down, at which the sum of weights reaches `target`: s.digit, its count and weight,
// and the weight before it. All threads.
__device__ inline void find_bin(SelectShared& s, uint64_t target, uint64_t own[2], uint64_t before) {
  if (before < target && target <= before + own[0] + own[1]) {
    const int at = before + own[0] < target ? 1 : 0;
    const uint32_t digit = kSelectBins - 1 - 2 * threadIdx.x - at;
    s.digit = digit;
    s.count = s.counts[digit];
    s.weight = own[at];
    s.before = at == 0 ? before : before + own[0];
  }
  __syncthreads();
}

// The smallest composite that is kept: of the tokens with at least `least`, the best ones until their weights reach the
// target. `sound`: the row has a finite maximum `max` and no NaN. All threads.
template <class Bins>
__device__ Composite select(const Logits& z, bool sound, float max, Composite least, const Bins& bins,
                            SelectShared& s) {
  // Similar logits share the leading bits of their keys, and many threads on one bin are slow. So the first bins are
  // 1/64 of a logit wide, down to 32 below the maximum.
  const auto near = [max](float x) {
    return static_cast<uint32_t>(kSelectBins - 1 - static_cast<int>(fminf((max - x) * 64.0f, kSelectBins - 1.0f)));
  };
  constexpr int kShifts[] = {53, 42, 32, 21, 10, 0};
  uint32_t first_bin = 0;
  bool binned = false;  // only tokens of first_bin are left
  int known = 64;       // bits from here on equal those of prefix
  Composite prefix = 0;
  uint64_t target = 0;
  const auto left = [&](Composite c, float x) {
    return c >= least && (!binned || near(x) == first_bin) && (known == 64 || (c >> known) == (prefix >> known));
  };
  for (int level = sound ? -1 : 0;; ++level) {
    for (int i = static_cast<int>(threadIdx.x); i < kSelectBins; i += kSelectThreads) s.counts[i] = 0, s.weights[i] = 0;
    __syncthreads();
    const int shift = level < 0 ? 0 : kShifts[level];
    const uint32_t mask = known - shift >= 11 ? kSelectBins - 1 : (1u << (known - shift)) - 1;
    for_tokens(z, [&](int token, float x) {
      const Composite c = composite(x, token);
      if (!left(c, x)) return;
      const uint32_t digit = level < 0 ? near(x) : static_cast<uint32_t>(c >> shift) & mask;
      atomicAdd(&s.counts[digit], 1u);
      if (Bins::kWeighted) atomicAdd(reinterpret_cast<unsigned long long*>(&s.weights[digit]), bins.weight(x));
    });
    __syncthreads();
    uint64_t own[2], total;
    for (int j = 0; j < 2; ++j) {
      const int digit = kSelectBins - 1 - 2 * static_cast<int>(threadIdx.x) - j;
      own[j] = Bins::kWeighted ? s.weights[digit] : s.counts[digit];
    }
    const uint64_t before = exclusive_sum(own[0] + own[1], s, total);
    if (target == 0) target = bins.target(total);
    find_bin(s, target, own, before);
    target -= s.before;
    if (level < 0) {
      first_bin = s.digit, binned = true;
    } else {
      prefix |= static_cast<Composite>(s.digit) << shift, known = shift;
      // The whole bin stays. With first_bin, other tokens of the prefix may be in the next bin.
      if (!binned && target == s.weight) return prefix;
    }
    if (s.count <= kSelectList) break;
    __syncthreads();
  }

  const uint32_t count = collect(z, s, left);
  if constexpr (Bins::kWeighted) {
    // Each thread has two adjacent entries of the list.
    uint64_t own[2], total;
    for (uint32_t j = 0; j < 2; ++j) {
      const uint32_t i = 2 * threadIdx.x + j;
      own[j] = i < count ? bins.weight(logit_of(s.list[i])) : 0;
    }
    const uint64_t before = exclusive_sum(own[0] + own[1], s, total);
    if (before < target && target <= before + own[0] + own[1])
      s.digit = 2 * threadIdx.x + (before + own[0] < target ? 1 : 0);
    __syncthreads();
    return s.list[s.digit];
  } else {
    return s.list[target - 1];
  }
}

}  // namespace refit::cuda
