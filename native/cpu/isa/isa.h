// The functions of one instruction set: raw functions over plain memory, from which kernels.cc makes the public table.
//
// Each isa_*.cc is compiled with its own flags. If such a unit emits an inline function out of line, the linker may
// keep that copy for the whole program, and then the portable path would run AVX code. These units therefore include
// only intrinsics, <cstdint> and headers whose functions have internal linkage. std:: containers stay in gemm.cc and
// kernels.cc.
#pragma once
#include <cstddef>
#include <cstdint>

namespace refit::cpu {

// A matrix product is made of panels and tiles. A panel holds `width` rows of w, cut into chunks of 16 bytes (four
// words; a word is one float or two neighbouring bf16) that are ordered by step: chunk s of every row, then chunk s + 1
// of every row.
//
// There is only one order of summation. An output has four fp32 lanes, which start at zero. Lane j adds word j of every
// chunk in order of k. At the end the lanes are added as (0 + 1) + (2 + 3), then the bias. Rows whose K ends within a
// chunk are padded with zeros. Between two blocks of K the lanes are stored in `carry`, so neither blocks nor the shape
// of a tile change a bit. Words of x are stored by tiles: [step][row][4].
struct GemmOps {
  int width;         // rows of w in a panel
  int carry;         // floats for the lanes of one row of x and one panel
  int tile_rows;     // the height of tiles that uses the registers best
  int direct_rows;   // the same for `direct`
  int max_rows;      // the most rows that `tile` and `direct` support
  int max_direct;    // up to this M reading w straight from memory beats packing it
  int per_word;      // elements per word
  int weight_bytes;  // of one element of w

  // One row of x into words, stride words from step to step.
  void (*convert)(const float* x, int64_t K, uint32_t* words, int64_t stride);
  // K elements from `w` on of rows [0, rows), which are row_bytes apart; rows past `rows` become zero. K is whole
  // chunks unless the rows end there. Up to kVectorSteps (gemm.cc) more steps are written. ahead: bytes from a word
  // that is read to one that is fetched into the cache (at any address: fetching never faults).
  void (*pack)(const uint8_t* w, int64_t row_bytes, int rows, int64_t K, int64_t ahead, uint32_t* panel);
  // A tile of x against a panel. first: lanes start at zero, otherwise at carry; last: y[m, 0..cols) is written too.
  // bias: null or `width` floats. K = 0 (steps 0, first and last) gives the bias.
  void (*tile)(int rows, const uint32_t* x, const uint32_t* panel, int64_t steps, bool first, bool last, float* carry,
               float* y, int64_t ldy, int cols, const float* bias);
  // A tile of x against `width` whole rows of w in memory, without packing.
  void (*direct)(int rows, const uint32_t* x, const uint8_t* w, int64_t row_bytes, int64_t K, int64_t ahead, float* y,
                 int64_t ldy, const float* bias);
};

// See Kernels in kernels.h.
struct VectorOps {
  float (*dot)(const float* a, const float* b, int64_t n);
  float (*dot_bf16)(const float* a, const uint16_t* b, int64_t n);
  void (*axpy)(float s, const float* x, float* y, int64_t n);
  void (*axpy_bf16)(float s, const uint16_t* x, float* y, int64_t n);
  float (*sum_squares)(const float* x, int64_t n);
  void (*round_bf16)(float* x, int64_t n);
  void (*to_bf16)(const float* x, uint16_t* y, int64_t n);
  void (*from_bf16)(const uint16_t* x, float* y, int64_t n);
  void (*silu_mul)(const float* gate, const float* up, float* out, int64_t n);
  void (*gelu_tanh_mul)(const float* gate, const float* up, float* out, int64_t n);
  float (*exp_sum)(float* x, float max, int64_t n);
  float (*max)(const float* x, int64_t n);
};

extern const VectorOps kVectorScalar;
extern const GemmOps kGemmScalarBf16, kGemmScalarF32;
#if defined(__x86_64__)
extern const VectorOps kVectorAvx2, kVectorAvx512;
extern const GemmOps kGemmAvx2Bf16, kGemmAvx2F32;
extern const GemmOps kGemmAvx512Bf16, kGemmAvx512F32;
extern const GemmOps kGemmAvx512Dp;  // vdpbf16ps
#endif

}  // namespace refit::cpu
