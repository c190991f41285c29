// The kernels of the benchmarks.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace refit::bench {

// Random words by position and seed, on the default stream.
void fill_words(uint64_t* out, size_t words, uint64_t seed);

// Read `count` times 16 bytes once, with blocks of 512 or 256 threads that read 4 or 8 times in a row.
void read_512_by_4(unsigned blocks, const uint4* data, size_t count, uint32_t* out, cudaStream_t stream);
void read_256_by_8(unsigned blocks, const uint4* data, size_t count, uint32_t* out, cudaStream_t stream);

}  // namespace refit::bench
