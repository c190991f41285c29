// The inner loops of attention, one set per instruction set.
#pragma once
#include <cstdint>
#include <string>

namespace refit::cpu {

// Keys are processed in blocks that start at multiples of this, for any page size.
constexpr int kKeyBlock = 64;
// Rows (token, head) that a tile holds in registers.
constexpr int kTileRows = 6;
// Vectors of V and of the accumulator are padded to this many floats.
constexpr int kDimAlign = 16;

struct AttentionTile {
  // Widens K of `tokens` tokens from token `token` of a page [dim][page_size] to kt [dim][kKeyBlock], from column
  // `column` on.
  void (*load_k)(const void* page, bool bf16, int page_size, int token, int tokens, int dim, float* kt, int column);
  // Widens V [tokens][dim] to v [tokens][padded].
  void (*load_v)(const void* src, bool bf16, int tokens, int dim, float* v, int padded);
  // s[r][j] = sum_d q[r][d] * kt[d][j] for r < rows <= kTileRows and j < keys (rounded up to whole vectors). s:
  // [rows][kKeyBlock].
  void (*scores)(const float* q, int rows, int dim, const float* kt, int keys, float* s);
  // acc[r] = acc[r] * alpha[r] + sum_{j < counts[r]} p[r][j] * v[j], keys in order. acc: [rows][padded].
  void (*mix)(const float* p, const float* alpha, const int* counts, int rows, const float* v, int padded, float* acc);
};

// The functions for the name of a kernel set (cpu/kernels.h).
const AttentionTile& attention_tile(const std::string& isa);

extern const AttentionTile kAttentionScalar;
#if defined(__x86_64__)
extern const AttentionTile kAttentionAvx2;
extern const AttentionTile kAttentionAvx512;
#endif

}  // namespace refit::cpu
