// The small kernels of a layer. Activations are Elements, row-major; arithmetic is fp32, rounded where Hugging Face's
// 16-bit modules hold tensors (as native/cpu does).
#pragma once
#include "core/model.h"
#include "cuda/device/types.h"

namespace refit::cuda {

// out[t] = table[tokens[t] - first_row] for tokens in [first_row, first_row + rows), else zeros. tokens [T] on the
// GPU, table [rows, hidden], out [T, hidden].
void embed(const int32_t* tokens, int count, const Element* table, int64_t first_row, int64_t rows, int hidden,
           Element* out, cudaStream_t stream);

// residual += delta (+ bias), rounded; then normed = RMSNorm(residual) * weight in the order of Hugging Face (fp32 mean
// of squares of the rounded sum, x * rstd rounded, times weight, rounded). residual, delta, normed [T, hidden]; bias,
// weight [hidden]. delta null: residual is only read. bias null: none. weight null: no norm, normed is not touched.
// round_once (here and below): as of ModelRecipe; x * rstd is then not rounded.
void add_norm(Element* residual, const Element* delta, const Element* bias, const Element* weight, float eps, int count,
              int hidden, Element* normed, cudaStream_t stream, bool round_once = false);

// NormPlacement::kPost: residual += RMSNorm(delta (+ bias, rounded)) * weight, rounded. bias null: none.
void norm_add(Element* residual, const Element* delta, const Element* bias, const Element* weight, float eps, int count,
              int hidden, cudaStream_t stream, bool round_once = false);

// RMSNorm of the rows that `rows` [count] (on the GPU) names: out[i] = norm(x[rows[i]]).
void norm_rows(const Element* x, const int32_t* rows, int count, const Element* weight, float eps, int hidden,
               Element* out, cudaStream_t stream, bool round_once = false);

// The norms of q and k in rope_and_cache. rstd null: each head by itself, q and k are the weights [head_dim]. Else
// rstd [T, 2] (of projection_rstd) holds for all heads of a token, and the weights are [heads * head_dim] and
// [kv_heads * head_dim]. Null weights: no norm.
struct HeadNorms {
  const Element* q = nullptr;
  const Element* k = nullptr;
  float eps = 0;
  const float* rstd = nullptr;
};

// qkv [T, (heads + 2 kv_heads) * head_dim]: q and k are normed and rotated by RoPE (halves, as in Llama) in place, and
// k and v are stored in the cache at slots[t] = page * page_size + slot. rope: [positions, head_dim] floats, per
// position cos [head_dim / 2] then sin [head_dim / 2], already rounded to Element (unless round_once, which also leaves
// the two products unrounded). positions, slots [T] on the GPU. head_dim must be a multiple of 8 up to 256, and all
// buffers except positions and slots must begin at multiples of 16 bytes; throws std::invalid_argument otherwise.
void rope_and_cache(Element* qkv, const HeadNorms& norms, const float* rope, const int32_t* positions,
                    const int32_t* slots, int count, int heads, const KvLayer& kv, cudaStream_t stream,
                    bool round_once = false);

// Norms of whole projections (QkNorm::kProjection) need the sums of squares of q and k over all ranks.
//
// Ranks exchange them with the all-reduce of Elements: every head has a place of its own (kSquarePieces elements) in
// each token's row, a KV head that of the head with its number, and a rank writes zeros to the places of other ranks'
// heads, so that the sum over ranks is a gather. A fp32 value goes as three Elements that hold it exactly; the
// all-reduce changes no bit of them.
constexpr int kSquarePieces = 6;  // 3 of q, 3 of k

// The heads of a rank, and where they are in the model.
struct HeadSquares {
  int head_dim, all_heads;
  int first_head, heads;
  int first_kv_head, counted_kv_heads;  // 0 where another rank holds the same KV heads and counts them
};

// The squares of this rank's q and k: pieces [T, all_heads, kSquarePieces]. qkv [T, ld] begins with q and k. Heads must
// begin at multiples of 16 bytes; throws std::invalid_argument otherwise.
void projection_squares(const Element* qkv, int64_t ld, const HeadSquares& heads, int count, Element* pieces,
                        cudaStream_t stream);
// rstd [T, 2] of q and k from the pieces of all heads. q_elements, k_elements: of the whole model.
void projection_rstd(const Element* pieces, int heads, int64_t q_elements, int64_t k_elements, float eps, int count,
                     float* rstd, cudaStream_t stream);

// out[t, i] = round(round(activation(x[t, i])) * x[t, inter + i]); x [T, 2 inter], out [T, inter].
void activate_mul(Activation activation, const Element* x, Element* out, int64_t count, int64_t inter,
                  cudaStream_t stream);

}  // namespace refit::cuda
