// The passes over all logits: best token, sum of exponentials, Gumbel-max draw (as in
// native/cpu/sampler/sampler_gumbel.cc). A block takes one chunk of one row; then one warp per row joins the chunks in
// order.
#include "core/philox.h"
#include "cuda/device/early_launch.cuh"
#include "cuda/sampler/sampler_row.cuh"

namespace refit::cuda {
namespace {

constexpr int kDrawThreads = 256, kWarps = kDrawThreads / 32;
constexpr int kStride = 4 * kDrawThreads;  // tokens that all threads take at once, four each
constexpr int kGroups = kSampleChunk / kStride;
constexpr int kAhead = 2;  // groups that a thread requests before it computes those before
constexpr float kSmallestNoise = 0x1p-33f;
// Covers the rounding of prob, exp, bounds and scores: a token is skipped only if it clearly cannot win.
constexpr float kMargin = 1.0f + 1e-3f;

template <class T, class Join>
__device__ T warp_join(T x, Join join) {
  for (int step = 16; step > 0; step /= 2) x = join(x, __shfl_xor_sync(~0u, x, step));
  return x;
}
struct Max {
  __device__ uint64_t operator()(uint64_t a, uint64_t b) const { return a > b ? a : b; }
};
struct Min {
  __device__ float operator()(float a, float b) const { return fminf(a, b); }
};
struct Sum {
  __device__ double operator()(double a, double b) const { return a + b; }
};

// Joins the values of all threads for the first warp, in a fixed order.
template <class T, class Join>
__device__ T block_join(T x, T none, T* shared, Join join) {
  x = warp_join(x, join);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  if (threadIdx.x < 32) x = warp_join(threadIdx.x < kWarps ? shared[threadIdx.x] : none, join);
  return x;
}

// Tokens i to i + 3 as they are compared; `f` is what is stored there. Those from `end` on are -infinity.
__device__ float4 shown(const Logits& z, float4 f, int i, int end) {
  if (i >= end) return {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
  f = z.masked(f, i);
  if (i + 4 > end) {
    if (i + 1 >= end) f.y = -INFINITY;
    if (i + 2 >= end) f.z = -INFINITY;
    f.w = -INFINITY;
  }
  return f;
}

// Loads groups of four logits of a row, `kStride` apart from token i on. Groups from `end` on are not loaded.
template <int Groups>
__device__ void load_groups(const float* z, int i, int end, float4 (&f)[Groups]) {
#pragma unroll
  for (int g = 0; g < Groups; ++g) {
    if (i + g * kStride < end) f[g] = *reinterpret_cast<const float4*>(z + i + g * kStride);
  }
}

__device__ float max_or_nan(float a, float b) {
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
  return most;
}

// The best of a thread's tokens, in a chunk with a NaN or with nothing above -infinity.
__device__ Composite best_of_any(const Logits& z, int first, int end) {
  Composite best = 0;
  for (int i = first; i < end; i += kStride) {
    for (int j = 0; j < 4 && i + j < end; ++j) best = max(best, composite(z[i + j], i + j));
  }
  return best;
}

__global__ void __launch_bounds__(kDrawThreads) best_kernel(SampleJob job, bool raw) {
  let_next_kernel_begin();
  wait_for_kernel_before();
  __shared__ uint64_t partial[kWarps];
  const int local = blockIdx.y;
  if (raw && !Row(job, local).raw) return;
  const int begin = static_cast<int>(blockIdx.x) * kSampleChunk, end = min(job.vocab, begin + kSampleChunk);
  const int first = begin + 4 * static_cast<int>(threadIdx.x);
  // Before the row's fields, so that these are not waited for.
  float4 loaded[kGroups];
  load_groups(job.logits + local * job.ld, first, end, loaded);
  const Row row(job, local);
  const Logits z(job, row, local, raw);
  // Division by the temperature keeps the order, so one of four quotients is the largest: that of the largest logit.
  float most = -INFINITY;
  float4 winners;
  int winner = -1;
  bool nan = false;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const int i = first + g * kStride;
    if (i >= end) break;
    const float4 f = shown(z, loaded[g], i, end);
    const float v = z.scaled(max_or_nan(max_or_nan(f.x, f.y), max_or_nan(f.z, f.w)));
    nan |= v != v;
    if (v > most) most = v, winner = i, winners = f;
  }
  Composite best;
  if (nan || winner < 0) {
    best = best_of_any(z, first, end);
  } else {
    // The first of equal ones.
    const float4 v = z.scaled(winners);
    best = composite(most, winner + (v.x == most ? 0 : v.y == most ? 1 : v.z == most ? 2 : 3));
  }
  nan = __syncthreads_or(nan) != 0;
  best = block_join<uint64_t>(best, 0, partial, Max());
  if (threadIdx.x == 0) job.scratch.best[static_cast<int64_t>(local) * job.chunks + blockIdx.x] = {best, nan};
}

// A pass over the original logits computes only sums, and only for rows that report them. In the other pass those rows
// draw, and the other rows may do both.
__device__ bool wants_sum(const Row& row, bool raw) { return row.wants && row.raw == raw; }

__device__ float gumbel(float v) { return -logf(-log1pf(-v)); }

// Score and token as one number; the larger score wins, then the lower token.
struct Candidate {
  float score;
  int token;
  __device__ uint64_t packed() const { return composite(score, token); }
};

// The facts about its row that a block needs to draw.
struct DrawStart {
  RowBest best;
  Candidate candidate;  // the best token, which is never filtered out
};

__device__ void start_draw(const SampleJob& job, int local, uint64_t seed, uint32_t position, DrawStart& shared) {
  if (threadIdx.x < 32) {
    const RowBest found = row_best(job, local);
    if (threadIdx.x == 0) {
      const int token = token_of(found.best);
      const PhiloxBlock noise = sample_noise(seed, position, token / 4);
      shared = {found, {gumbel(noise_uniform(noise.x[token % 4])), token}};
    }
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kDrawThreads) draw_kernel(SampleJob job, bool raw) {
  let_next_kernel_begin();
  wait_for_kernel_before();
  __shared__ DrawStart start;
  __shared__ uint64_t picks[kWarps];
  __shared__ double sums[kWarps];
  const int local = blockIdx.y;
  const Row row(job, local);
  const uint64_t seed = job.rows.row_seeds[row.r];
  const uint32_t position = static_cast<uint32_t>(job.rows.positions[row.r]);
  const bool sum_wanted = wants_sum(row, raw), draw = !raw && row.draws();
  if (!sum_wanted && !draw) return;
  const Logits z(job, row, local, raw);
  const int begin = static_cast<int>(blockIdx.x) * kSampleChunk, end = min(job.vocab, begin + kSampleChunk);
  const int own = 4 * static_cast<int>(threadIdx.x);
  float4 next[kAhead];
  load_groups(z.z, begin + own, end, next);
  start_draw(job, local, seed, position, start);
  if (!start.best.sound()) return;

  const float max = start.best.max();
  const Composite least = draw && row.filtered(job.vocab) ? job.scratch.least[local] : 0;
  const bool filters = least != 0 || row.min_p > 0.0f;
  Candidate mine = start.candidate;
  // Token i can win only if -log1p(-v) <= exp(z[i] - max - score), and v <= -log1p(-v). So logarithms, and for most
  // groups of four even the noise, are computed only for tokens that come close to the best score of the warp. This
  // changes no result.
  float reach = draw ? expf(-mine.score) * kMargin : 0.0f;
  double sum = 0.0;
  for (int from = begin; from < end; from += kAhead * kStride) {
    float4 now[kAhead];
#pragma unroll
    for (int g = 0; g < kAhead; ++g) now[g] = next[g];
    load_groups(z.z, from + kAhead * kStride + own, end, next);
#pragma unroll
    for (int g = 0; g < kAhead; ++g) {
      const int i = from + g * kStride + own;
      const float4 f = z.scaled(shown(z, now[g], i, end));
      const float v[4] = {f.x, f.y, f.z, f.w};
      float prob[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) prob[j] = expf(v[j] - max);
      sum += static_cast<double>((prob[0] + prob[1]) + (prob[2] + prob[3]));
      if (!draw) continue;
      if (filters) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (prob[j] < row.min_p || composite(v[j], i + j) < least) prob[j] = 0.0f;
        }
      }
      const float limit = fmaxf(fmaxf(prob[0], prob[1]), fmaxf(prob[2], prob[3])) * reach;
      if (__all_sync(~0u, limit < kSmallestNoise)) continue;
      const PhiloxBlock noise = sample_noise(seed, position, static_cast<uint32_t>(i / 4));
      const float least_noise = noise_uniform(min(min(noise.x[0], noise.x[1]), min(noise.x[2], noise.x[3])));
      if (!__any_sync(~0u, least_noise <= limit)) continue;
      // -log1p(-v) <= v / (1 - v) bounds every score from below, so the best bound of the warp is a limit for all.
      float u[4], closest = INFINITY;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        u[j] = noise_uniform(noise.x[j]);
        closest = fminf(closest, __fdividef(u[j], prob[j] * (1.0f - u[j])));
      }
      reach = fminf(reach, warp_join(closest, Min()) * kMargin);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (u[j] > prob[j] * reach) continue;
        const float score = (v[j] - max) + gumbel(u[j]);
        if (score > mine.score || (score == mine.score && i + j < mine.token)) mine = {score, i + j};
      }
    }
  }
  sum = block_join(sum, 0.0, sums, Sum());
  const uint64_t pick = draw ? block_join<uint64_t>(mine.packed(), 0, picks, Max()) : 0;
  if (threadIdx.x == 0) job.scratch.draws[static_cast<int64_t>(local) * job.chunks + blockIdx.x] = {sum, pick};
}

// One warp per row.
__global__ void __launch_bounds__(32) finish_kernel(SampleJob job, bool raw) {
  let_next_kernel_begin();
  wait_for_kernel_before();
  const int local = blockIdx.x;
  const Row row(job, local);
  if (raw && !row.raw) return;
  const RowBest best = row_best(job, local);
  const bool sum_wanted = wants_sum(row, raw), draw = !raw && row.draws();
  double sum = 0.0;
  uint64_t pick = 0;
  if (best.sound() && (sum_wanted || draw)) {
    const ChunkDraw* chunks = job.scratch.draws + static_cast<int64_t>(local) * job.chunks;
    for (int i = static_cast<int>(threadIdx.x); i < job.chunks; i += 32) {
      sum += chunks[i].sum;
      pick = max(pick, chunks[i].pick);
    }
    sum = warp_join(sum, Sum());
    pick = warp_join(pick, Max());
  }
  if (threadIdx.x != 0) return;

  int token = raw ? job.output.tokens[row.r] : row.target;
  if (token < 0) token = token_of(draw && best.sound() ? pick : best.best);
  const RowScale scale = {best.sound() ? log(sum) : nan(""), best.max()};
  float logprob = nanf("");
  if (sum_wanted && row.want_logprob) {
    const float z = Logits(job, row, local, raw)[token];
    logprob = static_cast<float>((static_cast<double>(z) - scale.max) - scale.log_sum);
  }
  job.output.tokens[row.r] = token;
  job.output.logprobs[row.r] = logprob;
  job.scratch.scales[local] = scale;
}

}  // namespace

void find_best(const SampleJob& job, bool raw, cudaStream_t stream) {
  launch_early(best_kernel, true, dim3(job.chunks, job.count), kDrawThreads, stream, "sampler: best token", job, raw);
}

void draw_tokens(const SampleJob& job, bool raw, cudaStream_t stream) {
  launch_early(draw_kernel, true, dim3(job.chunks, job.count), kDrawThreads, stream, "sampler: draw", job, raw);
  launch_early(finish_kernel, true, job.count, 32, stream, "sampler: finish", job, raw);
}

}  // namespace refit::cuda
