// The passes over all logits: best token, sum of exponentials, Gumbel-max draw (as in
// native/cpu/sampler/sampler_gumbel.cc). A block takes one chunk of one row; then one warp per row joins the chunks in
// order.
#include "core/philox.h"
#include "cuda/device/early_launch.cuh"
#include "cuda/sampler/sampler_row.cuh"

namespace refit::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr float kSmallestNoise = 0x1p-33f;
// Covers the rounding of prob, exp and the scores: a token is skipped only if it clearly cannot win.
constexpr float kMargin = 1.0f + 1e-3f;

template <class T, class Join>
__device__ T warp_join(T x, Join join) {
  for (int step = 16; step > 0; step /= 2) x = join(x, __shfl_xor_sync(~0u, x, step));
  return x;
}
struct Max {
  __device__ uint64_t operator()(uint64_t a, uint64_t b) const { return a > b ? a : b; }
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

__global__ void __launch_bounds__(kThreads) best_kernel(SampleJob job, bool raw) {
  let_next_kernel_begin();
  wait_for_kernel_before();
  __shared__ uint64_t partial[kWarps];
  const int local = blockIdx.y;
  const Row row(job, local);
  if (raw && !row.raw) return;
  const Logits z(job, row, local, raw);
  const int begin = static_cast<int>(blockIdx.x) * kSampleChunk, end = min(job.vocab, begin + kSampleChunk);
  Composite best = 0;
  bool nan = false;
#pragma unroll 4
  for (int i = begin + 4 * static_cast<int>(threadIdx.x); i < end; i += 4 * kThreads) {
    const float4 f = z.scaled(z.four(i));
    const float v[4] = {f.x, f.y, f.z, f.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (i + j >= end) break;
      nan |= v[j] != v[j];
      best = max(best, composite(v[j], i + j));
    }
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

__device__ void start_draw(const SampleJob& job, const Row& row, int local, bool draw, DrawStart& shared) {
  if (threadIdx.x < 32) {
    const RowBest found = row_best(job, local);
    if (threadIdx.x == 0) {
      shared.best = found;
      if (draw) {
        const int token = token_of(found.best);
        const PhiloxBlock noise =
            sample_noise(job.rows.row_seeds[row.r], static_cast<uint32_t>(job.rows.positions[row.r]), token / 4);
        shared.candidate = {gumbel(noise_uniform(noise.x[token % 4])), token};
      }
    }
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads) draw_kernel(SampleJob job, bool raw) {
  let_next_kernel_begin();
  wait_for_kernel_before();
  __shared__ DrawStart start;
  __shared__ uint64_t picks[kWarps];
  __shared__ double sums[kWarps];
  const int local = blockIdx.y;
  const Row row(job, local);
  const bool sum_wanted = wants_sum(row, raw), draw = !raw && row.draws();
  if (!sum_wanted && !draw) return;
  start_draw(job, row, local, draw, start);
  if (!start.best.sound()) return;

  const Logits z(job, row, local, raw);
  const float max = start.best.max();
  const uint64_t seed = job.rows.row_seeds[row.r];
  const uint32_t position = static_cast<uint32_t>(job.rows.positions[row.r]);
  const Composite least = draw && row.filtered(job.vocab) ? job.scratch.least[local] : 0;
  Candidate mine = start.candidate;
  // Token i can win only if -log1p(-v) <= exp(z[i] - max - score), and v <= -log1p(-v). So logarithms, and for most
  // groups of four even the noise, are computed only for tokens that come close. This changes no result.
  float reach = draw ? expf(-mine.score) * kMargin : 0.0f;
  double sum = 0.0;
  const int begin = static_cast<int>(blockIdx.x) * kSampleChunk, end = min(job.vocab, begin + kSampleChunk);
#pragma unroll 2
  for (int i = begin + 4 * static_cast<int>(threadIdx.x); i < end; i += 4 * kThreads) {
    const float4 f = z.scaled(z.four(i));
    const float v[4] = {f.x, f.y, f.z, f.w};
    float prob[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) prob[j] = i + j < end ? expf(v[j] - max) : 0.0f;
    sum += static_cast<double>((prob[0] + prob[1]) + (prob[2] + prob[3]));
    if (!draw) continue;
    float most = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (prob[j] < row.min_p || (least != 0 && composite(v[j], i + j) < least)) prob[j] = 0.0f;
      most = fmaxf(most, prob[j]);
    }
    if (most * reach < kSmallestNoise) continue;
    const PhiloxBlock noise = sample_noise(seed, position, static_cast<uint32_t>(i / 4));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float u = noise_uniform(noise.x[j]);
      if (u > prob[j] * reach) continue;
      const float score = (v[j] - max) + gumbel(u);
      if (score > mine.score || (score == mine.score && i + j < mine.token)) {
        mine = {score, i + j};
        reach = expf(-score) * kMargin;
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
  launch_early(best_kernel, true, dim3(job.chunks, job.count), kThreads, stream, "sampler: best token", job, raw);
}

void draw_tokens(const SampleJob& job, bool raw, cudaStream_t stream) {
  launch_early(draw_kernel, true, dim3(job.chunks, job.count), kThreads, stream, "sampler: draw", job, raw);
  launch_early(finish_kernel, true, job.count, 32, stream, "sampler: finish", job, raw);
}

}  // namespace refit::cuda
