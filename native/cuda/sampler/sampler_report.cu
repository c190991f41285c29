// Logprobs in addition to the token's: the best N, and those of given tokens.
#include "cuda/device/early_launch.cuh"
#include "cuda/sampler/sampler_select.cuh"

namespace refit::cuda {
namespace {

__device__ float logprob(float z, const RowScale& scale) {
  return static_cast<float>((static_cast<double>(z) - scale.max) - scale.log_sum);
}

// In rounds of as many tokens as the list holds, best first.
__global__ void __launch_bounds__(kSelectThreads) tops_kernel(SampleJob job) {
  let_next_kernel_begin();
  wait_for_kernel_before();
  __shared__ SelectShared shared;
  const int local = blockIdx.x;
  const Row row(job, local);
  if (row.top == 0) return;
  const RowScale scale = job.scratch.scales[local];
  const Logits z(job, row, local, row.raw);
  const bool sound = scale.log_sum == scale.log_sum;
  const int64_t out = job.rows.top_offsets[row.r];
  Composite above = ~Composite{0};
  for (int done = 0; done < row.top;) {
    const int end = min(row.top, done + kSelectList);
    const Composite least =
        end < job.vocab ? select(z, sound, scale.max, 0, BinsByCount{static_cast<uint64_t>(end)}, shared) : 0;
    collect(z, shared, [&](Composite c, float) { return c >= least && c < above; });
    for (int i = done + static_cast<int>(threadIdx.x); i < end; i += kSelectThreads) {
      const Composite c = shared.list[i - done];
      job.output.top_ids[out + i] = token_of(c);
      job.output.top_logprobs[out + i] = logprob(logit_of(c), scale);
    }
    __syncthreads();
    above = least, done = end;
  }
}

__global__ void ids_kernel(SampleJob job) {
  let_next_kernel_begin();
  wait_for_kernel_before();
  const int local = blockIdx.x;
  const Row row(job, local);
  const RowScale scale = job.scratch.scales[local];
  const Logits z(job, row, local, row.raw);
  const int end = job.rows.id_offsets[row.r + 1];
  for (int i = job.rows.id_offsets[row.r] + static_cast<int>(threadIdx.x); i < end; i += static_cast<int>(blockDim.x))
    job.output.id_logprobs[i] = logprob(z[job.rows.ids[i]], scale);
}

}  // namespace

void report_tops(const SampleJob& job, cudaStream_t stream) {
  launch_early(tops_kernel, true, job.count, kSelectThreads, stream, "sampler: top logprobs", job);
}

void report_ids(const SampleJob& job, cudaStream_t stream) {
  launch_early(ids_kernel, true, job.count, 256, stream, "sampler: logprobs of given tokens", job);
}

}  // namespace refit::cuda
