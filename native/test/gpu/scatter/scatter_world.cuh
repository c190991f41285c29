// Shared by the scatter's tests.
#pragma once
#include <algorithm>
#include <cstdint>

#include "cuda/device/check.h"
#include "test/random.h"

namespace {

using namespace refit;
using namespace refit::cuda;
using test::Random;

class Gpu {
 public:
  explicit Gpu(size_t bytes) { check(cudaMalloc(&data_, std::max<size_t>(bytes, 1)), "cudaMalloc"); }
  ~Gpu() { cudaFree(data_); }
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;
  uint8_t* data() const { return static_cast<uint8_t*>(data_); }

 private:
  void* data_ = nullptr;
};

}  // namespace
