// The tensors of real checkpoints and their places in fused parameters, as src/model lays them out.
#pragma once
#include <string>
#include <vector>

#include "core/model.h"
#include "core/write/write.h"

namespace refit::bench {

struct Shape {
  const char* name;
  int64_t hidden, layers, heads, kv_heads, head_dim, inter, vocab, experts, expert_inter;
};
constexpr Shape kQwen3_8B{"Qwen3-8B", 4096, 36, 32, 8, 128, 12288, 151936, 0, 0};
constexpr Shape kQwen3_30B_A3B{"Qwen3-30B-A3B", 2048, 48, 32, 4, 128, 0, 151936, 128, 768};

// Source 0 holds all tensors one after another as bf16, from byte `offset` on. Parameters are those of one of `ranks`
// ranks; rectangles are those of all ranks.
struct Checkpoint {
  std::vector<Param> params;
  WriteJob job;
  uint64_t bytes;  // of the source, including `offset`

  Checkpoint(const Shape& s, int ranks, uint64_t offset = 0) : bytes(offset), ranks_(ranks) {
    const int64_t q = s.heads * s.head_dim / ranks, kv = s.kv_heads * s.head_dim / ranks;
    split_rows("embed", s.vocab, s.hidden);
    for (int64_t l = 0; l < s.layers; l++) {
      whole(s.hidden, 1);
      const int qkv = param("qkv", q + 2 * kv, s.hidden);
      rows_into(qkv, q * ranks, s.hidden, 0);
      rows_into(qkv, kv * ranks, s.hidden, q);
      rows_into(qkv, kv * ranks, s.hidden, q + kv);
      whole(s.head_dim, 1);
      whole(s.head_dim, 1);
      cols_into(param("o", s.hidden, q), s.hidden, q * ranks, 0);
      whole(s.hidden, 1);
      if (s.experts == 0) {
        const int64_t inter = s.inter / ranks;
        const int gate_up = param("gate_up", 2 * inter, s.hidden);
        rows_into(gate_up, s.inter, s.hidden, 0);
        rows_into(gate_up, s.inter, s.hidden, inter);
        cols_into(param("down", s.hidden, inter), s.hidden, s.inter, 0);
        continue;
      }
      whole(s.experts, s.hidden);
      const int64_t inter = s.expert_inter / ranks;
      const int w13 = param("w13", s.experts * 2 * inter, s.hidden);
      const int w2 = param("w2", s.experts * s.hidden, inter);
      for (int64_t e = 0; e < s.experts; e++) {
        rows_into(w13, s.expert_inter, s.hidden, e * 2 * inter);
        rows_into(w13, s.expert_inter, s.hidden, e * 2 * inter + inter);
        cols_into(w2, s.hidden, s.expert_inter, e * s.hidden);
      }
    }
    whole(s.hidden, 1);
    split_rows("lm_head", s.vocab, s.hidden);
  }

  // Bytes of one rank's parameters, packed.
  uint64_t param_bytes() const {
    uint64_t sum = 0;
    for (const Param& p : params) sum += static_cast<uint64_t>(p.rows * p.cols) * 2;
    return sum;
  }

 private:
  int param(const char* name, int64_t rows, int64_t cols) {
    params.push_back({name, rows, cols});
    return static_cast<int>(params.size()) - 1;
  }
  int tensor(int64_t rows, int64_t cols) {
    job.tensors.push_back({0, bytes, DType::kBFloat16, rows, cols, static_cast<uint64_t>(cols) * 2, 2});
    bytes += static_cast<uint64_t>(rows * cols) * 2;
    return static_cast<int>(job.tensors.size()) - 1;
  }
  void whole(int64_t rows, int64_t cols) {
    const int p = param("whole", rows, cols), t = tensor(rows, cols);
    for (int r = 0; r < ranks_; r++) job.rects.push_back({t, r, p, 0, 0, rows, cols, 0, 0});
  }
  void rows_into(int p, int64_t rows, int64_t cols, int64_t at) {
    const int t = tensor(rows, cols);
    const int64_t share = rows / ranks_;
    for (int r = 0; r < ranks_; r++) job.rects.push_back({t, r, p, r * share, 0, share, cols, at, 0});
  }
  void cols_into(int p, int64_t rows, int64_t cols, int64_t at) {
    const int t = tensor(rows, cols);
    const int64_t share = cols / ranks_;
    for (int r = 0; r < ranks_; r++) job.rects.push_back({t, r, p, 0, r * share, rows, share, at, 0});
  }
  void split_rows(const char* name, int64_t rows, int64_t cols) {
    rows_into(param(name, rows / ranks_, cols), rows, cols, 0);
  }

  int ranks_;
};

}  // namespace refit::bench
