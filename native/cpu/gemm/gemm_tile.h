// The parts of GemmOps, written once over a vector type V. In an unnamed namespace on purpose: see isa.h.
//
// V must have the members that kernels_vec.h needs, and these: a vector is V::W / 4 chunks of four words; transpose
// swaps rows and chunks of that many vectors; broadcast puts one chunk everywhere; sum_chunks gives the sums of the
// chunks of four vectors, with chunk c of vector v at place 4 c + v. kAccumulators is the most vectors of lanes that
// leave enough registers for the rest.
#pragma once
#include <cstddef>
#include <cstdint>

#include "cpu/isa/isa.h"

namespace refit::cpu {
namespace {

constexpr int kVectors = 4;  // vectors of a panel for one step

// Words are floats; a lane adds one product at a time.
template <class V>
struct FloatArith {
  static constexpr int kPerWord = 1;
  static inline typename V::F words(typename V::I x) { return V::floats(x); }
  static inline typename V::F step(typename V::F acc, typename V::F a, typename V::F b) { return V::fma(a, b, acc); }
};

inline void convert_floats(const float* x, int64_t K, uint32_t* words, int64_t stride) {
  int64_t k = 0;
  for (; k + 4 <= K; k += 4, words += stride) __builtin_memcpy(words, x + k, 16);
  if (k < K) {
    words[0] = words[1] = words[2] = words[3] = 0;
    __builtin_memcpy(words, x + k, static_cast<std::size_t>(K - k) * 4);
  }
}

// Converts weights to the words of one vector. kBytes is the number of bytes that it reads at a time.
template <class V>
struct LoadWords {  // without a change: fp32, or pairs of bf16
  static constexpr int kBytes = 4 * V::W;
  static inline typename V::I full(const uint8_t* p) { return V::load_words(p); }
  static inline typename V::I part(const uint8_t* p, int bytes) { return V::load_words(p, bytes); }
};

template <class V>
struct LoadWiden {  // bf16 to fp32
  static constexpr int kBytes = 2 * V::W;
  static inline typename V::I full(const uint8_t* p) {
    return V::bits(V::load_bf16(reinterpret_cast<const uint16_t*>(p)));
  }
  static inline typename V::I part(const uint8_t* p, int bytes) {
    return V::bits(V::loadn_bf16(reinterpret_cast<const uint16_t*>(p), bytes / 2));
  }
};

// ElementBytes: bytes of one weight in memory.
template <class V, class Arith, class Load, int ElementBytes>
struct Gemm {
  using F = typename V::F;
  using I = typename V::I;
  static constexpr int W = V::W;
  static constexpr int kRows = W / 4;  // rows of w in one vector
  static constexpr int kCarry = kVectors * W;

  // The number of a panel's vectors that a tile of MR rows uses at a time.
  static constexpr int side(int MR) { return MR * 4 <= V::kAccumulators ? 4 : MR * 2 <= V::kAccumulators ? 2 : 1; }

  static void pack(const uint8_t* w, int64_t row_bytes, int rows, int64_t K, int64_t ahead, uint32_t* panel) {
    const int64_t bytes = K * ElementBytes;
    for (int v = 0; v < kVectors; v++) {
      // Chunk c of vector v belongs to row 4 c + v, which is where sum_chunks puts its sum.
      const uint8_t* from = w + v * row_bytes;
      uint32_t* out = panel + v * W;
      const auto put = [&](I* t) {
        V::transpose(t);
#pragma GCC unroll 4
        for (int c = 0; c < kRows; c++) V::store_words(out + c * kCarry, t[c]);
        out += kRows * kCarry;
      };
      I t[kRows];
      int64_t at = 0;
      if (rows == kVectors * kRows) {
        for (; at + Load::kBytes <= bytes; at += Load::kBytes) {
#pragma GCC unroll 4
          for (int c = 0; c < kRows; c++) {
            const uint8_t* p = from + c * kVectors * row_bytes + at;
            t[c] = Load::full(p);
            __builtin_prefetch(p + ahead, 0, 2);
          }
          put(t);
        }
      }
      for (; at < bytes; at += Load::kBytes) {
        const int here = static_cast<int>(bytes - at < Load::kBytes ? bytes - at : Load::kBytes);
        for (int c = 0; c < kRows; c++) {
          const bool there = c * kVectors + v < rows;
          t[c] = there ? Load::part(from + c * kVectors * row_bytes + at, here) : V::iset1(0);
        }
        put(t);
      }
    }
  }

  static void finish(const float* lanes, float* y, int cols, const float* bias) {
    F out = V::sum_chunks(V::load(lanes), V::load(lanes + W), V::load(lanes + 2 * W), V::load(lanes + 3 * W));
    if (bias != nullptr) out = V::add(out, V::load(bias));
    if (cols == W) {
      V::store(y, out);
    } else {
      V::storen(y, out, cols);
    }
  }

  template <int MR>
  static void tile_rows(const uint32_t* x, const uint32_t* panel, int64_t steps, bool first, float* carry) {
    constexpr int kSide = side(MR);
    for (int v0 = 0; v0 < kVectors; v0 += kSide) {
      F acc[MR][kSide];
#pragma GCC unroll 8
      for (int m = 0; m < MR; m++) {
#pragma GCC unroll 4
        for (int v = 0; v < kSide; v++) acc[m][v] = first ? V::zero() : V::load(carry + m * kCarry + (v0 + v) * W);
      }
      const uint32_t* xs = x;
      const uint32_t* ws = panel + v0 * W;
      for (int64_t s = 0; s < steps; s++) {
        decltype(Arith::words(V::iset1(0))) b[kSide];
#pragma GCC unroll 4
        for (int v = 0; v < kSide; v++) b[v] = Arith::words(V::load_words(ws + v * W));
#pragma GCC unroll 8
        for (int m = 0; m < MR; m++) {
          const auto a = Arith::words(V::broadcast(xs + m * 4));
#pragma GCC unroll 4
          for (int v = 0; v < kSide; v++) acc[m][v] = Arith::step(acc[m][v], a, b[v]);
        }
        xs += MR * 4;
        ws += kCarry;
      }
#pragma GCC unroll 8
      for (int m = 0; m < MR; m++) {
#pragma GCC unroll 4
        for (int v = 0; v < kSide; v++) V::store(carry + m * kCarry + (v0 + v) * W, acc[m][v]);
      }
    }
  }

  template <int MR = 1>
  static void tile(int rows, const uint32_t* x, const uint32_t* panel, int64_t steps, bool first, bool last,
                   float* carry, float* y, int64_t ldy, int cols, const float* bias) {
    if (rows > MR) {
      if constexpr (MR < V::kMaxRows) tile<MR + 1>(rows, x, panel, steps, first, last, carry, y, ldy, cols, bias);
      return;
    }
    tile_rows<MR>(x, panel, steps, first, carry);
    if (!last) return;
    for (int m = 0; m < MR; m++) finish(carry + m * kCarry, y + m * ldy, cols, bias);
  }

  // Few rows of x: w is read once, kSide * kRows of its rows at a time from one end to the other, which hardware
  // prefetchers handle best. `ahead`: bytes from a word that is read to one that will be needed.
  template <int MR>
  static void direct_rows(const uint32_t* x, const uint8_t* w, int64_t row_bytes, int64_t K, int64_t ahead,
                          float* lanes) {
    // Reading a few rows at once is fastest. Twice as many rows halve the work on x, which matters for a tall tile.
    constexpr int kWanted = (MR <= 4 ? 4 : 8) / kRows;
    constexpr int kSide = kWanted < side(MR) ? kWanted : side(MR);
    const int64_t step = kVectors * row_bytes;
    const int64_t bytes = K * ElementBytes;
    // Passes go through adjacent rows. After the last one comes the first row of the next panel.
    const uint8_t* const turn = w + kVectors * row_bytes;
    const int64_t jump = ahead < kVectors * row_bytes ? (W - kVectors) * row_bytes : 0;
    for (int v0 = 0; v0 < kVectors; v0 += kSide) {
      F acc[MR][kSide];
#pragma GCC unroll 8
      for (int m = 0; m < MR; m++) {
#pragma GCC unroll 4
        for (int v = 0; v < kSide; v++) acc[m][v] = V::zero();
      }
      const uint32_t* xs = x;
      const auto take = [&](I(*t)[kRows], int chunks) {
#pragma GCC unroll 4
        for (int v = 0; v < kSide; v++) V::transpose(t[v]);
#pragma GCC unroll 4
        for (int c = 0; c < kRows; c++) {
          if (c >= chunks) break;
#pragma GCC unroll 8
          for (int m = 0; m < MR; m++) {
            const auto a = Arith::words(V::broadcast(xs + (c * MR + m) * 4));
#pragma GCC unroll 4
            for (int v = 0; v < kSide; v++) acc[m][v] = Arith::step(acc[m][v], a, Arith::words(t[v][c]));
          }
        }
        xs += kRows * MR * 4;
      };
      const uint8_t* p = w + v0 * row_bytes;
      const uint8_t* const end = p + bytes;
      const uint8_t* const full = p + bytes / Load::kBytes * Load::kBytes;
      I t[kSide][kRows];
      while (p != full) {
        const uint8_t* q = p;
        const uint8_t* far = p + ahead;
        far += far >= turn ? jump : 0;
        const bool fetch = (full - p) % 64 < Load::kBytes;  // once per cache line
#pragma GCC unroll 4
        for (int v = 0; v < kSide; v++) {
          // Prevents a separate pointer for every row: there are not enough registers for that.
          asm("" : "+r"(q), "+r"(far));
#pragma GCC unroll 4
          for (int c = 0; c < kRows; c++) {
            t[v][c] = Load::full(q + c * step);
            if (Load::kBytes == 64 || fetch) __builtin_prefetch(far + c * step, 0, 2);
          }
          q += row_bytes;
          far += row_bytes;
        }
        take(t, kRows);
        p += Load::kBytes;
      }
      if (p != end) {
        const int left = static_cast<int>(end - p);
        for (int v = 0; v < kSide; v++) {
          for (int c = 0; c < kRows; c++) t[v][c] = Load::part(p + c * step + v * row_bytes, left);
        }
        take(t, (left / ElementBytes + 4 * Arith::kPerWord - 1) / (4 * Arith::kPerWord));
      }
#pragma GCC unroll 8
      for (int m = 0; m < MR; m++) {
#pragma GCC unroll 4
        for (int v = 0; v < kSide; v++) V::store(lanes + m * kCarry + (v0 + v) * W, acc[m][v]);
      }
    }
  }

  template <int MR = 1>
  static void direct(int rows, const uint32_t* x, const uint8_t* w, int64_t row_bytes, int64_t K, int64_t ahead,
                     float* y, int64_t ldy, const float* bias) {
    if (rows > MR) {
      if constexpr (MR < V::kMaxRows) direct<MR + 1>(rows, x, w, row_bytes, K, ahead, y, ldy, bias);
      return;
    }
    alignas(64) float lanes[MR * kCarry];
    direct_rows<MR>(x, w, row_bytes, K, ahead, lanes);
    for (int m = 0; m < MR; m++) finish(lanes + m * kCarry, y + m * ldy, W, bias);
  }

  static constexpr GemmOps ops(void (*convert)(const float*, int64_t, uint32_t*, int64_t)) {
    return {W,       kCarry, V::kTileRows, V::kDirectRows, V::kMaxRows, V::kMaxDirect, Arith::kPerWord, ElementBytes,
            convert, pack,   tile<1>,      direct<1>};
  }
};

}  // namespace
}  // namespace refit::cpu
