// The kernels of all_reduce_test: numbers by call, rank and position, and what the collectives make of them.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/device/types.h"

namespace refit::all_reduce_test {

using cuda::Element;

// The first wrong element of a rank.
struct Report {
  unsigned long long wrong;
  int call;
  int64_t index;
  float got, expected;
};

void launch_fill(Element* to, int64_t count, int call, int rank, cudaStream_t stream);

// The elements of one rank's part, 512 at a time.
void launch_share(Element* to, int64_t count, int call, int rank, int ranks, cudaStream_t stream);

// The sums, and poison behind them up to `guarded`.
void launch_check(int blocks, const Element* got, int64_t count, int64_t guarded, int call, int ranks, Report* report,
                  cudaStream_t stream);

// After a gather of rows of `columns` elements of each rank.
void launch_check_gather(const Element* got, int64_t count, int64_t guarded, int call, int ranks, int64_t columns,
                         Report* report, cudaStream_t stream);

void launch_poison(int blocks, Element* to, int64_t count, cudaStream_t stream);

void launch_delay(int microseconds, cudaStream_t stream);

}  // namespace refit::all_reduce_test
