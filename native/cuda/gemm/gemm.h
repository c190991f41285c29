// y = x wᵀ (+ bias): x [M, K] of Element, row-major with leading dimension ldx, w [N, K] of Element, row-major (as in
// checkpoints), bias [N] of Element, or null, y [M, N] of Element or float with leading dimension ldy; fp32
// accumulation.
//
// Three paths: our weight-streaming kernel for few rows, cuBLASLt for the rest, and our mma.sync kernel if cuBLASLt is
// missing or REFIT_CUBLASLT=off. With SumOrder::kAscending cuBLASLt takes few rows, too, and only algorithms that do
// not divide k and are proved to give the bits of our mma.sync kernel (gemm_order.h); that kernel runs products without
// such an algorithm.
#pragma once
#include <memory>
#include <string>

#include "cuda/device/types.h"

namespace refit::cuda {

struct GemmShape {
  int64_t m, n, k;
  int64_t ldx, ldy;
};

struct Product {
  Product(const GemmShape& shape, const Element* x, const Element* w, const Element* bias, Element* y)
      : shape(shape), x(x), w(w), bias(bias), y(y), wide(false) {}
  Product(const GemmShape& shape, const Element* x, const Element* w, const Element* bias, float* y)
      : shape(shape), x(x), w(w), bias(bias), y(y), wide(true) {}

  GemmShape shape;
  const Element *x, *w, *bias;
  void* y;
  bool wide;  // y is float
};

// The order in which an element of y is summed.
enum class SumOrder : uint8_t {
  kAny,        // the fastest; it may depend on the shape
  kAscending,  // 16 k at a time, ascending: an element's bits depend on its rows of x and w alone
};

enum class GemmPath {
  kAuto,
  kStream,   // own, at most 16 rows: bandwidth of the weights
  kLibrary,  // cuBLASLt
  kTile,     // own, any shape and alignment
};

// One per rank; used on the rank's thread and one stream. The GPU must be current at construction.
class Gemm {
 public:
  // Opens cuBLASLt if it is found. `workspace`: GPU memory that stays for life (32 MiB on Hopper).
  Gemm(void* workspace, size_t workspace_bytes, SumOrder order = SumOrder::kAny);
  ~Gemm();
  Gemm(const Gemm&) = delete;
  Gemm& operator=(const Gemm&) = delete;

  void run(const Product& product, cudaStream_t stream);
  // Loads everything that a run of this product needs; y may be overwritten, and x with SumOrder::kAscending. cuBLASLt
  // loads a kernel at its first use and waits for the GPUs: for ever, if one of them waits for this rank in a
  // collective.
  void load(const Product& product, cudaStream_t stream);
  // From now on cuBLASLt runs loaded products only; others throw std::logic_error. SumOrder::kAscending requires it
  // from the beginning.
  void require_loaded();

  // Version and file of cuBLASLt, or why it is missing: for logs.
  const std::string& library() const;
  SumOrder order() const;
  bool has_library() const;

  // For tests and benchmarks: from now on products take this path; the tiled kernel runs those that it cannot take.
  void force(GemmPath path);
  // The path that the last product took.
  GemmPath last_path() const;

 private:
  struct Plans;
  std::unique_ptr<Plans> plans_;
};

}  // namespace refit::cuda
