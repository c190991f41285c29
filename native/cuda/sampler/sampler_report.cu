// Logprobs in addition to the token's: the best N, and those of given tokens.
#include "cuda/device/check.h"
#include "cuda/sampler/sampler_select.cuh"

namespace refit::cuda {
namespace {

__device__ float logprob(float z, const RowScale& scale) {
  return static_cast<float>((static_cast<double>(z) - scale.max) - scale.log_sum);
}

// In rounds of as many tokens as the list holds, best first.
__global__ void __launch_bounds__(kSelectThreads) tops_kernel(SampleJob job) {
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
  tops_kernel<<<job.count, kSelectThreads, 0, stream>>>(job);
  check_launch("sampler: top logprobs");
}

void report_ids(const SampleJob& job, cudaStream_t stream) {
  ids_kernel<<<job.count, 256, 0, stream>>>(job);
  check_launch("sampler: logprobs of given tokens");
}

}  // namespace refit::cuda
