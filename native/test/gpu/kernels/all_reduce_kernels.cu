#include <cuda_runtime.h>

#include <cmath>

#include "test/gpu/kernels/all_reduce_kernels.h"

namespace refit::all_reduce_test {
namespace {

using cuda::element_bits;
using cuda::element_of_bits;
using cuda::to_element;
using cuda::to_float;

constexpr uint16_t kPoison = 0x7fc5;  // a NaN

__device__ uint32_t mix(uint32_t x) {
  x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15, x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

// Numbers of different sizes, so the order of the sum shows in its bits.
__device__ Element value(int call, int rank, int64_t i) {
  const uint32_t h = mix(static_cast<uint32_t>(i) * 2654435761u + mix(static_cast<uint32_t>(call * 8 + rank)));
  const float x = (static_cast<float>(h >> 8) * 0x1p-24f - 0.5f) * static_cast<float>(1u << (h & 7));
  return to_element(x);
}

__global__ void fill_kernel(Element* to, int64_t count, int call, int rank) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x)
    to[i] = value(call, rank, i);
}

__global__ void share_kernel(Element* to, int64_t count, int call, int rank, int ranks) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    if (i / 512 % ranks == rank) to[i] = value(call, 0, i);
  }
}

__global__ void check_kernel(const Element* got, int64_t count, int64_t guarded, int call, int ranks, Report* report) {
  const auto fail = [&](int64_t i, float found, float expected) {
    if (atomicAdd(&report->wrong, 1ull) == 0)
      report->call = call, report->index = i, report->got = found, report->expected = expected;
  };
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < guarded; i += int64_t{gridDim.x} * blockDim.x) {
    const uint16_t bits = element_bits(got[i]);
    if (i >= count) {
      if (bits != kPoison) fail(i, to_float(got[i]), NAN);
      continue;
    }
    float sum = to_float(value(call, 0, i));
    for (int r = 1; r < ranks; ++r) sum += to_float(value(call, r, i));
    const Element expected = to_element(sum);
    if (bits != element_bits(expected)) fail(i, to_float(got[i]), to_float(expected));
  }
}

__global__ void check_gather_kernel(const Element* got, int64_t count, int64_t guarded, int call, int ranks,
                                    int64_t columns, Report* report) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < guarded; i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t row = i / (columns * ranks), rank = i / columns % ranks, at = row * columns + i % columns;
    const uint16_t expected = i < count ? element_bits(value(call, static_cast<int>(rank), at)) : kPoison;
    if (element_bits(got[i]) == expected || atomicAdd(&report->wrong, 1ull) != 0) continue;
    report->call = call, report->index = i, report->got = to_float(got[i]);
    report->expected = to_float(element_of_bits(expected));
  }
}

__global__ void poison_kernel(Element* to, int64_t count) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x)
    to[i] = element_of_bits(kPoison);
}

__global__ void delay_kernel(int microseconds) {
  for (int i = 0; i < microseconds; ++i) __nanosleep(1000);
}

}  // namespace

void launch_fill(Element* to, int64_t count, int call, int rank, cudaStream_t stream) {
  fill_kernel<<<64, 256, 0, stream>>>(to, count, call, rank);
}

void launch_share(Element* to, int64_t count, int call, int rank, int ranks, cudaStream_t stream) {
  share_kernel<<<32, 256, 0, stream>>>(to, count, call, rank, ranks);
}

void launch_check(int blocks, const Element* got, int64_t count, int64_t guarded, int call, int ranks, Report* report,
                  cudaStream_t stream) {
  check_kernel<<<blocks, 256, 0, stream>>>(got, count, guarded, call, ranks, report);
}

void launch_check_gather(const Element* got, int64_t count, int64_t guarded, int call, int ranks, int64_t columns,
                         Report* report, cudaStream_t stream) {
  check_gather_kernel<<<64, 256, 0, stream>>>(got, count, guarded, call, ranks, columns, report);
}

void launch_poison(int blocks, Element* to, int64_t count, cudaStream_t stream) {
  poison_kernel<<<blocks, 256, 0, stream>>>(to, count);
}

void launch_delay(int microseconds, cudaStream_t stream) { delay_kernel<<<1, 1, 0, stream>>>(microseconds); }

}  // namespace refit::all_reduce_test
