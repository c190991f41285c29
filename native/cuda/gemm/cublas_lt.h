// cuBLASLt through dlopen. The few declarations are our own (the C interface of cuBLAS 12 and 13; names and numbers
// follow its public header cublasLt.h).
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <tuple>

#include "cuda/gemm/gemm.h"

namespace refit::cuda {

// One per rank; used from the rank's thread, on one stream, with the GPU current.
class CublasLt {
 public:
  // Opens the library unless REFIT_CUBLASLT=off; REFIT_CUBLASLT may also be the path of the file. A missing library is
  // no error. `workspace`: GPU memory, aligned to 256 bytes, that stays for life. With SumOrder::kAscending only
  // algorithms are known that do not divide k; they need no workspace.
  CublasLt(void* workspace, size_t workspace_bytes, SumOrder order);
  ~CublasLt();
  CublasLt(const CublasLt&) = delete;
  CublasLt& operator=(const CublasLt&) = delete;

  bool there() const { return handle_ != nullptr; }
  // Version and file, or why the library is missing.
  const std::string& info() const { return info_; }

  // False if the library is missing or has no algorithm for the product: then nothing was started. Throws
  // std::runtime_error on failure. Without a choice, the first product of a shape takes the best algorithm and keeps
  // it; later ones allocate nothing.
  bool run(const Product& product, cudaStream_t stream);
  // Same as Gemm::load, after a choice if there is to be one.
  void load(const Product& product, cudaStream_t stream);
  void require_loaded() { requires_loaded_ = true; }

  // Whether the product has algorithms, and none has been chosen yet.
  bool wants_choice(const Product& product);
  // Takes the best of the product's algorithms that `accepts` does. It is called with a function that starts `sample`,
  // a product of the same m, k and leading dimensions, and returns false if the algorithm refuses it. Without an
  // accepted algorithm the library does not run the product.
  using Launch = std::function<bool()>;
  void choose(const Product& product, const Product& sample, const std::function<bool(const Launch&)>& accepts,
              cudaStream_t stream);
  // From now on the library does not run the product.
  void refuse(const Product& product);

 private:
  struct Api;
  struct Plan;
  // m, n, k, ldx, ldy, wide, bias, alignment
  using Key = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, bool, bool, int>;

  // Null if the library cannot run it.
  Plan* find(const Product& product);
  void describe(Plan& plan, const Key& key, const Element* bias) const;
  void destroy(Plan& plan) const;
  void find_algorithms(Plan& plan, int align) const;
  bool run(Plan& plan, const Product& product, cudaStream_t stream) const;
  // False if the library refuses the plan's algorithm for it.
  bool launch(Plan& plan, const Product& product, cudaStream_t stream) const;

  std::unique_ptr<Api> api_;
  void* handle_ = nullptr;
  void* workspace_;
  size_t workspace_bytes_;
  const SumOrder order_;
  std::string info_;
  std::map<Key, Plan> plans_;
  bool requires_loaded_ = false;
};

}  // namespace refit::cuda
