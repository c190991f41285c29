// Shared by the tests of matrix products: GPU buffers with guards, numbers by position, a reference in double, and
// timing.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cuda/device/check.h"
#include "cuda/device/types.h"
#include "test/check.h"
#include "test/gpu/kernels/matrix_kernels.h"

namespace refit::test {

using cuda::check;
using cuda::double_to_element;
using cuda::Element;
using cuda::element_bits;
using cuda::element_of_bits;
using cuda::round_element;
using cuda::to_element;
using cuda::to_float;

inline void synchronize(const char* what) { check(cudaDeviceSynchronize(), what); }

// Elements of the GPU between two guards. Poison is 0xff: NaN as Element and as float, -1 as an integer.
template <class T>
class Buffer {
 public:
  explicit Buffer(size_t count) : count_(count) {
    check(cudaMalloc(&raw_, bytes() + 2 * kGuard), "cudaMalloc of a test buffer");
    poison();
  }
  ~Buffer() { cudaFree(raw_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  T* data() { return reinterpret_cast<T*>(raw_ + kGuard); }
  size_t size() const { return count_; }
  size_t bytes() const { return count_ * sizeof(T); }
  void poison() { check(cudaMemset(raw_, 0xff, bytes() + 2 * kGuard), "cudaMemset"); }

  void put(const std::vector<T>& values, size_t at = 0) {
    check(cudaMemcpy(data() + at, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "copy to the GPU");
  }
  std::vector<T> get(size_t count, size_t at = 0) {
    std::vector<T> values(count);
    check(cudaMemcpy(values.data(), data() + at, count * sizeof(T), cudaMemcpyDeviceToHost), "copy from the GPU");
    return values;
  }
  std::vector<T> get() { return get(count_); }

  void check_guards(const char* name, const std::string& what) {
    std::vector<uint8_t> guard(2 * kGuard);
    check(cudaMemcpy(guard.data(), raw_, kGuard, cudaMemcpyDeviceToHost), "copy of a guard");
    check(cudaMemcpy(guard.data() + kGuard, raw_ + kGuard + bytes(), kGuard, cudaMemcpyDeviceToHost),
          "copy of a guard");
    size_t bad = 0;
    while (bad < guard.size() && guard[bad] == 0xff) bad++;
    CHECKF(bad == guard.size(), "%s: guard %s %s was written at byte %zu", what.c_str(),
           bad < kGuard ? "before" : "behind", name, bad % kGuard);
  }

 private:
  static constexpr size_t kGuard = 1024;
  size_t count_;
  uint8_t* raw_ = nullptr;
};

struct Reference {
  std::vector<double> sum, size;  // [M, N]
};

inline Reference reference(int64_t M, int64_t N, int64_t K, const Element* x, int64_t ldx, const Element* w,
                           const Element* bias) {
  Buffer<double> sum(M * N), size(M * N);
  launch_reference(M, N, K, x, ldx, w, bias, sum.data(), size.data());
  return {sum.get(), size.get()};
}

// Error that fp32 sums of tensor cores may have, relative to the sum of absolute products; far below the part of one
// product.
constexpr double kSumError = 0x1p-18;
// Rounding error of Element, relative to the value; and that of the smallest ones, which only fp16 comes near.
constexpr double kElementError = cuda::of_element(0x1.02p-8, 0x1.02p-11);
constexpr double kElementQuantum = cuda::of_element(0.0, 0x1p-24);

// Microseconds of one call of work(i), i = 0, 1, ..., in a row of `times` on the default stream.
template <class Work>
double microseconds(int times, Work work) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "cudaEventCreate");
  check(cudaEventCreate(&end), "cudaEventCreate");
  for (int i = 0; i < 3; i++) work(i);
  check(cudaEventRecord(begin), "cudaEventRecord");
  for (int i = 0; i < times; i++) work(i);
  check(cudaEventRecord(end), "cudaEventRecord");
  synchronize("a benchmark");
  float ms = 0;
  check(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return ms * 1000.0 / times;
}

// GB/s of reading the buffer with the whole GPU.
inline double read_bandwidth(const void* data, size_t bytes, uint32_t* to) {
  int processors = 0;
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0), "cudaDeviceGetAttribute");
  double best = 0;
  for (int blocks : {2, 4}) {
    const double us = microseconds(5, [&](int) { launch_read(processors * blocks, data, bytes, to); });
    best = std::max(best, static_cast<double>(bytes) / us * 1e-3);
  }
  return best;
}

struct Options {
  bool quick = false, bench = false;
  uint64_t seed = 1;
};

// --quick, --bench, --seed N
inline Options parse(int argc, char** argv) {
  Options options;
  options.seed = std::random_device{}();
  for (int i = 1; i < argc; i++) {
    if (std::strcmp(argv[i], "--quick") == 0) options.quick = true;
    if (std::strcmp(argv[i], "--bench") == 0) options.bench = true;
    if (std::strcmp(argv[i], "--seed") == 0 && i + 1 < argc) options.seed = std::strtoull(argv[++i], nullptr, 10);
  }
  std::printf("seed %llu\n", static_cast<unsigned long long>(options.seed));
  return options;
}

}  // namespace refit::test
