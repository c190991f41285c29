// What the scatter's tests are made with.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/checksum.h"
#include "cuda/check.h"

namespace {

using namespace refit;
using namespace refit::cuda;

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() { return splitmix64_mix(state_ += kGolden); }
  int64_t below(int64_t n) { return static_cast<int64_t>(next() % static_cast<uint64_t>(n)); }
  bool chance(int64_t one_in) { return below(one_in) == 0; }

 private:
  uint64_t state_;
};

class Card {
 public:
  explicit Card(size_t bytes) { check(cudaMalloc(&data_, std::max<size_t>(bytes, 1)), "cudaMalloc"); }
  ~Card() { cudaFree(data_); }
  Card(const Card&) = delete;
  Card& operator=(const Card&) = delete;
  uint8_t* data() const { return static_cast<uint8_t*>(data_); }

 private:
  void* data_ = nullptr;
};

}  // namespace
