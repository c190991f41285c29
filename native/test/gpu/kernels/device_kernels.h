// The kernels of arena_test and rank_test, which know no elements.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace refit::test {

// Words by position and key.
void fill_words(int blocks, uint64_t* words, size_t count, uint64_t key, cudaStream_t stream);
// Adds the number of words that fill_words would have written differently.
void count_wrong_words(const uint64_t* words, size_t count, uint64_t key, unsigned long long* wrong);

void launch_nothing(cudaStream_t stream);
// Runs for about `ms` milliseconds: a million cycles each.
void launch_wait(int ms, cudaStream_t stream);
void launch_add_one(int* value, cudaStream_t stream);

}  // namespace refit::test
