// The small kernels of a layer. Activations are bf16, row-major; arithmetic is fp32, rounded where Hugging Face's bf16
// modules hold bf16 tensors (as native/cpu does).
#pragma once
#include "cuda/device/types.h"

namespace refit::cuda {

// out[t] = table[tokens[t] - first_row] for tokens in [first_row, first_row + rows), else zeros. tokens [T] on the
// GPU, table [rows, hidden], out [T, hidden].
void embed(const int32_t* tokens, int count, const bf16* table, int64_t first_row, int64_t rows, int hidden, bf16* out,
           cudaStream_t stream);

// residual += delta (+ bias), rounded; then normed = RMSNorm(residual) * weight in the order of Hugging Face (fp32 mean
// of squares of the rounded sum, x * rstd rounded, times weight, rounded). residual, delta, normed [T, hidden]; bias,
// weight [hidden]. delta null: residual is only read. bias null: none. weight null: no norm, normed is not touched.
void add_norm(bf16* residual, const bf16* delta, const bf16* bias, const bf16* weight, float eps, int count, int hidden,
              bf16* normed, cudaStream_t stream);

// RMSNorm of the rows that `rows` [count] (on the GPU) names: out[i] = norm(x[rows[i]]).
void norm_rows(const bf16* x, const int32_t* rows, int count, const bf16* weight, float eps, int hidden, bf16* out,
               cudaStream_t stream);

// qkv [T, (heads + 2 kv_heads) * head_dim]: q and k are normed per head where weights [head_dim] are given, rotated by
// RoPE (halves, as Llama) in place, and k and v are stored in the cache at slots[t] = page * page_size + slot.
// rope: [positions, head_dim] floats, per position cos [head_dim / 2] then sin [head_dim / 2], already rounded to bf16.
// positions, slots [T] on the GPU. head_dim is a multiple of 8 up to 256 and all buffers but positions and slots begin
// at multiples of 16 bytes; throws std::invalid_argument otherwise.
void rope_and_cache(bf16* qkv, const bf16* q_norm, const bf16* k_norm, float eps, const float* rope,
                    const int32_t* positions, const int32_t* slots, int count, int heads, const KvLayer& kv,
                    cudaStream_t stream);

// out[t, i] = round(round(silu(x[t, i])) * x[t, inter + i]); x [T, 2 inter], out [T, inter].
void silu_mul(const bf16* x, bf16* out, int64_t count, int64_t inter, cudaStream_t stream);

}  // namespace refit::cuda
