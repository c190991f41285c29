// cuBLASLt through dlopen. The few declarations are our own (the C interface of cuBLAS 12 and 13; names and numbers
// follow its public header cublasLt.h).
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <tuple>

#include "cuda/gemm/gemm.h"

namespace refit::cuda {

// One per rank; used from the rank's thread, on one stream, with the GPU current.
class CublasLt {
 public:
  // Opens the library unless REFIT_CUBLASLT=off; REFIT_CUBLASLT may also be the path of the file. `workspace`: GPU
  // memory, aligned to 256 bytes, that stays for life. A missing library is no error.
  CublasLt(void* workspace, size_t workspace_bytes);
  ~CublasLt();
  CublasLt(const CublasLt&) = delete;
  CublasLt& operator=(const CublasLt&) = delete;

  bool there() const { return handle_ != nullptr; }
  // Version and file, or why the library is missing.
  const std::string& info() const { return info_; }

  // False if the library is missing or has no algorithm for the product: then nothing was started. Throws
  // std::runtime_error on failure. The first product of a shape chooses the best algorithm and keeps it; later ones
  // allocate nothing.
  bool run(const Product& product, cudaStream_t stream);
  // Same as Gemm::load.
  void load(const Product& product, cudaStream_t stream);
  void require_loaded() { requires_loaded_ = true; }

 private:
  struct Api;
  struct Plan;
  // m, n, k, ldx, ldy, wide, bias, alignment
  using Key = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, bool, bool, int>;

  // Null if there is no algorithm for it.
  Plan* plan_of(const Product& product);
  void make(Plan& plan, const Key& key, const bf16* bias);
  bool launch(Plan& plan, const Product& product, cudaStream_t stream);

  std::unique_ptr<Api> api_;
  void* handle_ = nullptr;
  void* workspace_;
  size_t workspace_bytes_;
  std::string info_;
  std::map<Key, Plan> plans_;
  bool requires_loaded_ = false;
};

}  // namespace refit::cuda
