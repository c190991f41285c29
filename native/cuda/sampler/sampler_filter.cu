// Top-k, then top-p of the rest, as a limit for draw_tokens: one block per row.
#include "cuda/device/early_launch.cuh"
#include "cuda/sampler/sampler_select.cuh"

namespace refit::cuda {
namespace {

__global__ void __launch_bounds__(kSelectThreads) limits_kernel(SampleJob job) {
  let_next_kernel_begin();
  wait_for_kernel_before();
  __shared__ SelectShared shared;
  __shared__ RowBest best;
  const int local = blockIdx.x;
  const Row row(job, local);
  if (!row.filtered(job.vocab)) return;
  block_row_best(job, local, best);
  if (!best.sound()) return;
  const Logits z(job, row, local, false);
  const float max = best.max();
  Composite least = 0;
  if (row.top_k > 0 && row.top_k < job.vocab)
    least = select(z, true, max, 0, BinsByCount{static_cast<uint64_t>(row.top_k)}, shared);
  if (row.top_p < 1.0f) least = select(z, true, max, least, BinsByProb{row.top_p, max}, shared);
  if (threadIdx.x == 0) job.scratch.least[local] = least;
}

}  // namespace

void find_limits(const SampleJob& job, cudaStream_t stream) {
  launch_early(limits_kernel, true, job.count, kSelectThreads, stream, "sampler: top-k and top-p", job);
}

}  // namespace refit::cuda
