// Penalties and logit bias, one block per row. The arithmetic equals that of native/cpu/sampler/sampler_penalty.cc,
// product by product.
#include <algorithm>

#include "cuda/device/early_launch.cuh"
#include "cuda/sampler/sampler_row.cuh"

namespace refit::cuda {
namespace {

constexpr int kThreads = 512;

struct Slice {
  int begin, end;
  __device__ Slice(const int32_t* offsets, int r) : begin(offsets[r]), end(offsets[r + 1]) {}
};

struct Penalties {
  float frequency, presence, repetition;
  __device__ Penalties(const SampleJob& job, int r) {
    const float* floats = job.rows.row_floats + static_cast<int64_t>(r) * kRowFloats;
    frequency = floats[3], presence = floats[4], repetition = floats[5];
  }
  __device__ bool none() const { return frequency == 0.0f && presence == 0.0f && repetition == 1.0f; }
};

__device__ void penalize(const SampleJob& job, int r, float* z, int32_t* counts, const Penalties& penalties) {
  const Slice history(job.rows.history_offsets, r);
  const int32_t* tokens = job.rows.history;
  const int prompt = history.begin + job.rows.row_ints[static_cast<int64_t>(r) * kRowInts + 5];
  const int first = history.begin + static_cast<int>(threadIdx.x);
  for (int i = first; i < history.end; i += kThreads) atomicExch(counts + tokens[i], 0);
  __syncthreads();
  for (int i = prompt + static_cast<int>(threadIdx.x); i < history.end; i += kThreads) atomicAdd(counts + tokens[i], 1);
  __syncthreads();
  for (int i = first; i < history.end; i += kThreads) {
    const int token = tokens[i];
    // The first thread that takes the count handles the token.
    const int count = atomicExch(counts + token, -1);
    if (count < 0) continue;
    float x = z[token];
    x = x > 0.0f ? __fdiv_rn(x, penalties.repetition) : __fmul_rn(x, penalties.repetition);
    if (count > 0)
      x = __fsub_rn(x, __fadd_rn(__fmul_rn(static_cast<float>(count), penalties.frequency), penalties.presence));
    z[token] = x;
  }
  __syncthreads();
}

__device__ void add_bias(const SampleJob& job, int r, float* z, int32_t* counts) {
  const Slice bias(job.rows.bias_offsets, r);
  const int32_t* tokens = job.rows.bias_tokens;
  const float* values = job.rows.bias_values;
  const int first = bias.begin + static_cast<int>(threadIdx.x);
  for (int i = first; i < bias.end; i += kThreads) atomicExch(counts + tokens[i], 0);
  __syncthreads();
  bool again = false;
  for (int i = first; i < bias.end; i += kThreads) again |= atomicAdd(counts + tokens[i], 1) > 0;
  // A token that is listed twice gets its sums in the order of the list.
  if (__syncthreads_or(again)) {
    if (threadIdx.x == 0) {
      for (int i = bias.begin; i < bias.end; ++i) z[tokens[i]] += values[i];
    }
  } else {
    for (int i = first; i < bias.end; i += kThreads) z[tokens[i]] += values[i];
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads) adjust_kernel(SampleJob job, bool save) {
  let_next_kernel_begin();
  wait_for_kernel_before();
  int32_t* counts = job.scratch.counts + static_cast<int64_t>(blockIdx.x) * job.vocab;
  for (int local = blockIdx.x; local < job.count; local += gridDim.x) {
    const Row row(job, local);
    const Penalties penalties(job, row.r);
    float* z = job.logits + local * job.ld;
    const Slice history(job.rows.history_offsets, row.r), bias(job.rows.bias_offsets, row.r);
    const bool punished = !penalties.none() && history.end > history.begin, biased = bias.end > bias.begin;
    if (save && row.raw) {
      for (int i = history.begin + static_cast<int>(threadIdx.x); punished && i < history.end; i += kThreads)
        job.rows.saved_history[i] = z[job.rows.history[i]];
      for (int i = bias.begin + static_cast<int>(threadIdx.x); i < bias.end; i += kThreads)
        job.rows.saved_bias[i] = z[job.rows.bias_tokens[i]];
      __syncthreads();
    }
    if (punished) penalize(job, row.r, z, counts, penalties);
    if (biased) add_bias(job, row.r, z, counts);
  }
}

__global__ void __launch_bounds__(kThreads) restore_kernel(SampleJob job) {
  let_next_kernel_begin();
  wait_for_kernel_before();
  const int local = blockIdx.x;
  const Row row(job, local);
  if (!row.raw) return;
  const Penalties penalties(job, row.r);
  float* z = job.logits + local * job.ld;
  const Slice history(job.rows.history_offsets, row.r), bias(job.rows.bias_offsets, row.r);
  // A token that is listed more than once was saved with the same value each time.
  for (int i = history.begin + static_cast<int>(threadIdx.x); !penalties.none() && i < history.end; i += kThreads)
    z[job.rows.history[i]] = job.rows.saved_history[i];
  for (int i = bias.begin + static_cast<int>(threadIdx.x); i < bias.end; i += kThreads)
    z[job.rows.bias_tokens[i]] = job.rows.saved_bias[i];
}

}  // namespace

void adjust_logits(const SampleJob& job, bool save, cudaStream_t stream) {
  launch_early(adjust_kernel, true, std::min(job.count, kCountArrays), kThreads, stream, "sampler: penalties and bias",
               job, save);
}

void restore_logits(const SampleJob& job, cudaStream_t stream) {
  launch_early(restore_kernel, true, job.count, kThreads, stream, "sampler: raw logits", job);
}

}  // namespace refit::cuda
