// Included once by each attention_<isa>.cc, after it has defined, in an unnamed namespace, `Vec`: a vector of
// Vec::kWidth floats with load, store, broadcast, widen (bf16), operator* and fma, and kColumns: the vectors that a
// tile holds per row.
//
// Everything here has internal linkage: an inline function compiled with one file's instruction set must not serve
// another's.
#pragma once
#include <cstdint>
#include <cstring>

#include "cpu/attention/attention_tile.h"

namespace refit::cpu {
namespace {

constexpr int kWidth = Vec::kWidth;

inline float widen_one(uint16_t b) {
  const uint32_t u = static_cast<uint32_t>(b) << 16;
  float f;
  std::memcpy(&f, &u, sizeof f);
  return f;
}

void load_k(const void* page, bool bf16, int page_size, int token, int tokens, int dim, float* kt, int column) {
  for (int d = 0; d < dim; ++d) {
    float* to = kt + d * kKeyBlock + column;
    const int64_t at = static_cast<int64_t>(d) * page_size + token;
    int j = 0;
    if (bf16) {
      const uint16_t* from = static_cast<const uint16_t*>(page) + at;
      for (; j + kWidth <= tokens; j += kWidth) Vec::widen(from + j).store(to + j);
      for (; j < tokens; ++j) to[j] = widen_one(from[j]);
    } else {
      const float* from = static_cast<const float*>(page) + at;
      for (; j + kWidth <= tokens; j += kWidth) Vec::load(from + j).store(to + j);
      for (; j < tokens; ++j) to[j] = from[j];
    }
  }
}

void load_v(const void* src, bool bf16, int tokens, int dim, float* v, int padded) {
  for (int t = 0; t < tokens; ++t) {
    float* to = v + static_cast<int64_t>(t) * padded;
    const int64_t at = static_cast<int64_t>(t) * dim;
    int j = 0;
    if (bf16) {
      const uint16_t* from = static_cast<const uint16_t*>(src) + at;
      for (; j + kWidth <= dim; j += kWidth) Vec::widen(from + j).store(to + j);
      for (; j < dim; ++j) to[j] = widen_one(from[j]);
    } else {
      const float* from = static_cast<const float*>(src) + at;
      for (; j + kWidth <= dim; j += kWidth) Vec::load(from + j).store(to + j);
      for (; j < dim; ++j) to[j] = from[j];
    }
    for (; j < padded; ++j) to[j] = 0.0f;
  }
}

template <int R, int C>
void scores_tile(const float* q, int dim, const float* kt, float* s) {
  Vec acc[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) acc[r][c] = Vec::broadcast(0.0f);
  }
  for (int d = 0; d < dim; ++d) {
    Vec k[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) k[c] = Vec::load(kt + d * kKeyBlock + c * kWidth);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec x = Vec::broadcast(q[r * dim + d]);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) acc[r][c] = fma(x, k[c], acc[r][c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) acc[r][c].store(s + r * kKeyBlock + c * kWidth);
  }
}

template <int R>
void scores_rows(const float* q, int dim, const float* kt, int keys, float* s) {
  int j = 0;
  for (; j + (kColumns - 1) * kWidth < keys; j += kColumns * kWidth) scores_tile<R, kColumns>(q, dim, kt + j, s + j);
  for (; j < keys; j += kWidth) scores_tile<R, 1>(q, dim, kt + j, s + j);
}

void scores(const float* q, int rows, int dim, const float* kt, int keys, float* s) {
  switch (rows) {
    case 1:
      return scores_rows<1>(q, dim, kt, keys, s);
    case 2:
      return scores_rows<2>(q, dim, kt, keys, s);
    case 3:
      return scores_rows<3>(q, dim, kt, keys, s);
    case 4:
      return scores_rows<4>(q, dim, kt, keys, s);
    case 5:
      return scores_rows<5>(q, dim, kt, keys, s);
    default:
      return scores_rows<6>(q, dim, kt, keys, s);
  }
}

template <int R, int C>
void mix_tile(const float* p, const float* alpha, int begin, int end, const float* v, int padded, float* acc) {
  Vec sum[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      sum[r][c] = Vec::load(acc + r * padded + c * kWidth);
      if (alpha != nullptr) sum[r][c] = sum[r][c] * Vec::broadcast(alpha[r]);
    }
  }
  for (int j = begin; j < end; ++j) {
    Vec x[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) x[c] = Vec::load(v + j * padded + c * kWidth);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec w = Vec::broadcast(p[r * kKeyBlock + j]);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sum[r][c] = fma(w, x[c], sum[r][c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sum[r][c].store(acc + r * padded + c * kWidth);
  }
}

template <int R>
void mix_rows(const float* p, const float* alpha, int begin, int end, const float* v, int padded, float* acc) {
  int d = 0;
  for (; d + kColumns * kWidth <= padded; d += kColumns * kWidth)
    mix_tile<R, kColumns>(p, alpha, begin, end, v + d, padded, acc + d);
  for (; d < padded; d += kWidth) mix_tile<R, 1>(p, alpha, begin, end, v + d, padded, acc + d);
}

void mix(const float* p, const float* alpha, const int* counts, int rows, const float* v, int padded, float* acc) {
  // The keys that all rows see go through the tile. The further keys of later tokens follow row by row, in the same
  // order. No row multiplies a key that it must not see, not even by zero, because that key may be infinite.
  int common = counts[0];
  for (int r = 1; r < rows; ++r) common = counts[r] < common ? counts[r] : common;
  switch (rows) {
    case 1:
      mix_rows<1>(p, alpha, 0, common, v, padded, acc);
      break;
    case 2:
      mix_rows<2>(p, alpha, 0, common, v, padded, acc);
      break;
    case 3:
      mix_rows<3>(p, alpha, 0, common, v, padded, acc);
      break;
    case 4:
      mix_rows<4>(p, alpha, 0, common, v, padded, acc);
      break;
    case 5:
      mix_rows<5>(p, alpha, 0, common, v, padded, acc);
      break;
    default:
      mix_rows<6>(p, alpha, 0, common, v, padded, acc);
      break;
  }
  for (int r = 0; r < rows; ++r) {
    if (counts[r] > common)
      mix_rows<1>(p + r * kKeyBlock, nullptr, common, counts[r], v, padded, acc + static_cast<int64_t>(r) * padded);
  }
}

constexpr AttentionTile kTile{load_k, load_v, scores, mix};

}  // namespace
}  // namespace refit::cpu
