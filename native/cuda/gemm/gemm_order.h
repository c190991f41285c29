// A proof that a matrix kernel sums as our tiled kernel does (SumOrder::kAscending): a sample whose exact sums are all
// 0 is computed by both. Its results are rounding errors alone, so any other order of the same products gives other
// bits.
#pragma once
#include <cstdint>

#include "cuda/gemm/gemm.h"

namespace refit::cuda {

// Writes a [rows, k] with leading dimension ld: numbers by position in [-scale, scale), whose second half repeats the
// first one backwards, with the other sign if `opposed`. The products of a row of the one kind with a row of the other
// cancel.
void fill_sample(Element* to, int64_t rows, int64_t k, int64_t ld, float scale, bool opposed, cudaStream_t stream);

// A sample of a product: all rows of x, and as many rows of w and elements of bias as fit, at most 1,024. An
// algorithm's blocks each sum along all of k, so the number of columns does not change its order.
class OrderSample {
 public:
  // Overwrites the product's x, and later its y. `memory` holds the sample's w and bias, aligned to 256. k is even.
  OrderSample(const Product& product, void* memory, size_t bytes, cudaStream_t stream);

  // Without columns if the memory holds none.
  const Product& product() const { return product_; }
  // Forgets the results of a run before.
  void clear() const;
  // The digest of y; waits for the stream.
  uint64_t digest() const;

 private:
  Product product_;
  uint64_t* digest_ = nullptr;
  cudaStream_t stream_;
};

}  // namespace refit::cuda
