// The context and the buffers that all parts of the forward pass share.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "core/model.h"
#include "core/pool.h"
#include "cpu/kernels.h"

namespace refit::cpu {

struct Context {
  const Kernels& k;
  Pool& pool;
  DType dtype;              // of parameters and KV cache
  bool round_once = false;  // ModelRecipe::round_once
  Activation activation = Activation::kSilu;

  // With parameters of 16 bits, activations are rounded where Hugging Face's modules of that dtype hold tensors.
  void round(float* x, int64_t n) const {
    if (dtype == DType::kBFloat16) k.round_bf16(x, n);
    if (dtype == DType::kFloat16) std::transform(x, x + n, x, [](float f) { return round_to(DType::kFloat16, f); });
  }
  // Rounds between two operations of one norm or of RoPE.
  void round_between(float* x, int64_t n) const {
    if (!round_once) round(x, n);
  }
  // A parameter's values as floats.
  void widen(const void* x, float* y, int64_t n) const {
    if (dtype == DType::kBFloat16) {
      k.from_bf16(static_cast<const uint16_t*>(x), y, n);
    } else if (dtype == DType::kFloat16) {
      const auto* const from = static_cast<const uint16_t*>(x);
      std::transform(from, from + n, y, [](uint16_t bits) { return to_float(DType::kFloat16, bits); });
    } else {
      std::copy_n(static_cast<const float*>(x), n, y);
    }
  }
};

// Uninitialised floats, aligned to 64 bytes, that only grow: a step reuses the memory of earlier steps.
class Buffer {
 public:
  Buffer() = default;
  ~Buffer() { std::free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  Buffer(Buffer&& other) noexcept : data_(other.data_), size_(other.size_) {
    other.data_ = nullptr;
    other.size_ = 0;
  }

  float* get(int64_t n) {
    if (n > size_) {
      std::free(data_);
      size_ = 0;
      const size_t bytes = (static_cast<size_t>(n) * sizeof(float) + 63) / 64 * 64;
      data_ = static_cast<float*>(std::aligned_alloc(64, bytes));
      if (data_ == nullptr) throw std::bad_alloc();
      size_ = n;
    }
    return data_;
  }

 private:
  float* data_ = nullptr;
  int64_t size_ = 0;
};

// Calls fn(begin, end, thread) over [0, n) in blocks of about 16K elements, `width` elements per index. The calling
// thread does small work alone.
template <class Fn>
void for_blocks(Pool& pool, int64_t n, int64_t width, Fn&& fn) {
  const int64_t grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(1, width));
  if (n <= grain || pool.threads() == 1) {
    if (n > 0) fn(int64_t{0}, n, 0);
    return;
  }
  pool.parallel_for((n + grain - 1) / grain,
                    [&](int64_t block, int thread) { fn(block * grain, std::min(n, (block + 1) * grain), thread); });
}

}  // namespace refit::cpu
