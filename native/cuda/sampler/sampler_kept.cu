// The kept sets: the tokens that top-k, top-p and min-p keep, best first, and the token's logprob within them. One
// block per row.
#include "cuda/device/early_launch.cuh"
#include "cuda/sampler/sampler_select.cuh"

namespace refit::cuda {
namespace {

struct KeptShared {
  SelectShared select;
  double mass[kSelectThreads / 32];
  int32_t counts[kSelectThreads / 32];
  RowBest best;
};

// Sums over the block, in a fixed order; all threads get them.
__device__ void sum_block(KeptShared& s, double& mass, int32_t& count) {
  for (int step = 16; step > 0; step /= 2) {
    mass += __shfl_xor_sync(~0u, mass, step);
    count += __shfl_xor_sync(~0u, count, step);
  }
  if (threadIdx.x % 32 == 0) s.mass[threadIdx.x / 32] = mass, s.counts[threadIdx.x / 32] = count;
  __syncthreads();
  mass = 0.0, count = 0;
  for (int w = 0; w < kSelectThreads / 32; ++w) mass += s.mass[w], count += s.counts[w];
}

__global__ void __launch_bounds__(kSelectThreads) kept_kernel(SampleJob job) {
  let_next_kernel_begin();
  wait_for_kernel_before();
  __shared__ KeptShared shared;
  const int local = blockIdx.x;
  const Row row(job, local);
  if (!row.want_kept) return;
  const int token = job.output.tokens[row.r];
  int32_t* ids = job.output.kept_ids + job.rows.kept_offsets[row.r];
  const int32_t room = job.rows.kept_offsets[row.r + 1] - job.rows.kept_offsets[row.r];
  block_row_best(job, local, shared.best);
  if (row.greedy || !shared.best.sound()) {
    if (threadIdx.x != 0) return;
    ids[0] = token;
    job.output.kept_counts[row.r] = 1;
    job.output.kept_logprobs[row.r] = shared.best.sound() ? 0.0f : nanf("");
    return;
  }
  const Logits z(job, row, local, false);
  const float max = shared.best.max();
  const Composite least = row.filtered(job.vocab) ? job.scratch.least[local] : 0;
  // The same tokens as draw_kernel's.
  const auto kept = [&](Composite c, float prob) { return c >= least && prob >= row.min_p && prob > 0.0f; };
  double mass = 0.0;
  int32_t count = 0;
  for_tokens(z, [&](int i, float x) {
    const float prob = expf(x - max);
    if (kept(composite(x, i), prob)) mass += static_cast<double>(prob), ++count;
  });
  sum_block(shared, mass, count);
  if (threadIdx.x == 0) {
    job.output.kept_counts[row.r] = count;
    job.output.kept_logprobs[row.r] = static_cast<float>((static_cast<double>(z[token]) - max) - log(mass));
  }
  if (count > room) return;
  // In rounds of as many tokens as the list holds.
  Composite above = ~Composite{0};
  for (int32_t done = 0; done < count;) {
    const bool last = count - done <= kSelectList;
    const Composite from =
        last ? 0 : select(z, true, max, 0, BinsByCount{static_cast<uint64_t>(done) + kSelectList}, shared.select);
    __syncthreads();
    const auto listed = static_cast<int32_t>(collect(
        z, shared.select, [&](Composite c, float x) { return c >= from && c < above && kept(c, expf(x - max)); }));
    for (int i = static_cast<int>(threadIdx.x); i < listed; i += kSelectThreads)
      ids[done + i] = token_of(shared.select.list[i]);
    __syncthreads();
    done = last ? count : done + listed;
    above = from;
  }
}

}  // namespace

void report_kept(const SampleJob& job, cudaStream_t stream) {
  launch_early(kept_kernel, true, job.count, kSelectThreads, stream, "sampler: kept sets", job);
}

}  // namespace refit::cuda
