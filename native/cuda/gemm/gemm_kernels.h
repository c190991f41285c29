// Launchers of our matrix kernels; see gemm.h for the operands. Out: Element or float.
#pragma once
#include <cstdint>

#include "cuda/gemm/gemm.h"

namespace refit::cuda {

// Maximum number of rows of x for the streaming kernel.
constexpr int64_t kStreamMaxRows = 16;

// Whether a kernel can load 16 bytes at a time from it.
inline bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// Whether the streaming kernel can read these operands: at most kStreamMaxRows rows, each at a multiple of 16 bytes,
// and K a multiple of 8.
bool stream_takes(const GemmShape& shape, const Element* x, const Element* w);

template <class Out>
void stream_gemm(const GemmShape& shape, const Element* x, const Element* w, const Element* bias, Out* y,
                 cudaStream_t stream);

// `processors`: number of multiprocessors of the GPU; it decides the tile size.
template <class Out>
void tile_gemm(const GemmShape& shape, const Element* x, const Element* w, const Element* bias, Out* y, int processors,
               cudaStream_t stream);

// Loads the kernels onto the current GPU and sets their shared memory; call it before the first launch.
void prepare_stream_gemm();
void prepare_tile_gemm();

}  // namespace refit::cuda
