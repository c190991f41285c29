// The view of a row that the sampler's kernels share.
#pragma once
#include "core/step.h"
#include "cuda/sampler/sampler_job.h"

namespace refit::cuda {

__device__ inline uint32_t order_key(float z) {
  if (z != z) return 0;
  const uint32_t u = __float_as_uint(z + 0.0f);
  return (u & 0x80000000u) != 0 ? ~u : u | 0x80000000u;
}
// The logit of a key: NaN for 0; -0 comes back as +0.
__device__ inline float logit_of(uint32_t key) {
  return __uint_as_float((key & 0x80000000u) != 0 ? key & 0x7fffffffu : ~key);
}
__device__ inline Composite composite(float z, int token) {
  return (static_cast<uint64_t>(order_key(z)) << 32) | (0xffffffffu - static_cast<uint32_t>(token));
}
__device__ inline int token_of(Composite c) { return static_cast<int>(0xffffffffu - static_cast<uint32_t>(c)); }
__device__ inline float logit_of(Composite c) { return logit_of(static_cast<uint32_t>(c >> 32)); }

struct Row {
  int r;  // in the step
  int target, top_k, top;
  float temperature, top_p, min_p;
  const uint32_t* mask;  // null: all tokens are allowed
  bool greedy, wants, want_logprob, want_kept, raw;

  __device__ Row(const SampleJob& job, int local) : r(job.first_row + local) {
    const int32_t* ints = job.rows.row_ints + static_cast<int64_t>(r) * kRowInts;
    const float* floats = job.rows.row_floats + static_cast<int64_t>(r) * kRowFloats;
    target = ints[1], top_k = ints[2], top = ints[3];
    mask = ints[6] < 0 ? nullptr : job.rows.masks + int64_t{ints[6]} * ((job.vocab + 31) / 32);
    temperature = floats[0], top_p = floats[1], min_p = floats[2];
    greedy = temperature == 0.0f || top_k == 1;
    want_logprob = (ints[4] & kRowWantLogprob) != 0;
    want_kept = (ints[4] & kRowWantKept) != 0 && target < 0;
    wants = want_logprob || top > 0 || job.rows.id_offsets[r + 1] > job.rows.id_offsets[r];
    raw = wants && (ints[4] & kRowRawLogprob) != 0;
  }
  __device__ bool draws() const { return target < 0 && !greedy; }
  __device__ bool filtered(int vocab) const { return draws() && ((top_k > 0 && top_k < vocab) || top_p < 1.0f); }
  // The divisor of the logits.
  __device__ float divisor() const { return temperature == 0.0f ? 1.0f : temperature; }
};

// A row's logits, masked and divided by the temperature when they are read; the memory is not changed.
struct Logits {
  const float* z;
  const uint32_t* mask;
  int vocab;
  float divisor;

  // `raw`: without mask and temperature.
  __device__ Logits(const SampleJob& job, const Row& row, int local, bool raw)
      : z(job.logits + local * job.ld),
        mask(raw ? nullptr : row.mask),
        vocab(job.vocab),
        divisor(raw ? 1.0f : row.divisor()) {}
  __device__ float scaled(float x) const { return divisor == 1.0f ? x : __fdiv_rn(x, divisor); }
  __device__ float operator[](int i) const {
    return mask != nullptr && (mask[i / 32] >> (i % 32) & 1) == 0 ? -INFINITY : scaled(z[i]);
  }
  // Tokens i to i + 3; i is a multiple of 4 below vocab. The memory behind the vocabulary is padding.
  __device__ float4 four(int i) const { return masked(*reinterpret_cast<const float4*>(z + i), i); }
  __device__ float4 masked(float4 f, int i) const {
    if (mask == nullptr) return f;
    const uint32_t allowed = mask[i / 32] >> (i % 32);
    if ((allowed & 1) == 0) f.x = -INFINITY;
    if ((allowed & 2) == 0) f.y = -INFINITY;
    if ((allowed & 4) == 0) f.z = -INFINITY;
    if ((allowed & 8) == 0) f.w = -INFINITY;
    return f;
  }
  __device__ float4 scaled(float4 f) const { return {scaled(f.x), scaled(f.y), scaled(f.z), scaled(f.w)}; }
};

struct RowBest {
  Composite best;
  bool nan;
  __device__ float max() const { return logit_of(best); }
  // If false, the row takes its best token and its logprobs are NaN.
  __device__ bool sound() const { return !nan && isfinite(max()); }
};

// Combines the row's chunks; one whole warp calls it.
__device__ inline RowBest row_best(const SampleJob& job, int local) {
  const ChunkBest* chunks = job.scratch.best + static_cast<int64_t>(local) * job.chunks;
  Composite best = 0;
  int nan = 0;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x % 32); i < job.chunks; i += 32) {
    best = max(best, chunks[i].best);
    nan |= chunks[i].nan;
  }
  for (int step = 16; step > 0; step /= 2) best = max(best, __shfl_xor_sync(~0u, best, step));
  return {best, __any_sync(~0u, nan) != 0};
}

// The same for all threads of a block; shared: one object for the block, which the first warp computes.
__device__ inline RowBest block_row_best(const SampleJob& job, int local, RowBest& shared) {
  if (threadIdx.x < 32) {
    const RowBest found = row_best(job, local);
    if (threadIdx.x == 0) shared = found;
  }
  __syncthreads();
  return shared;
}

}  // namespace refit::cuda
