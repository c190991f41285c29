#include "cuda/gemm.h"

#include <type_traits>

#include "cuda/check.h"
#include "cuda/cublas_lt.h"
#include "cuda/gemm_kernels.h"

namespace refit::cuda {
namespace {

// Up to so many rows the streaming kernel is chosen before cuBLASLt.
constexpr int64_t kStreamRowsByChoice = 16;
static_assert(kStreamRowsByChoice <= kStreamMaxRows);

int multiprocessors() {
  int device = 0, count = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "the number of multiprocessors");
  return count;
}

}  // namespace

struct Gemm::Plans {
  Plans(void* workspace, size_t bytes) : library(workspace, bytes), processors(multiprocessors()) {}
  CublasLt library;
  const int processors;
  GemmPath forced = GemmPath::kAuto, last = GemmPath::kAuto;
};

Gemm::Gemm(void* workspace, size_t workspace_bytes) : plans_(std::make_unique<Plans>(workspace, workspace_bytes)) {
  prepare_stream_gemm();
  prepare_tile_gemm();
}

Gemm::~Gemm() = default;

template <class Out>
void Gemm::dispatch(const GemmShape& shape, const bf16* x, const bf16* w, const bf16* bias, Out* y,
                    cudaStream_t stream) {
  if (shape.m <= 0 || shape.n <= 0) return;
  const auto allowed = [&](GemmPath path) { return plans_->forced == GemmPath::kAuto || plans_->forced == path; };
  const int64_t most = plans_->forced == GemmPath::kAuto ? kStreamRowsByChoice : kStreamMaxRows;
  if (allowed(GemmPath::kStream) && shape.m <= most && stream_takes(shape, x, w)) {
    stream_gemm(shape, x, w, bias, y, stream);
    plans_->last = GemmPath::kStream;
  } else if (allowed(GemmPath::kLibrary) &&
             plans_->library.run(shape, x, w, bias, y, std::is_same_v<Out, float>, stream)) {
    plans_->last = GemmPath::kLibrary;
  } else {
    tile_gemm(shape, x, w, bias, y, plans_->processors, stream);
    plans_->last = GemmPath::kTile;
  }
}

void Gemm::run(const GemmShape& shape, const bf16* x, const bf16* w, const bf16* bias, bf16* y, cudaStream_t stream) {
  dispatch(shape, x, w, bias, y, stream);
}

void Gemm::run(const GemmShape& shape, const bf16* x, const bf16* w, const bf16* bias, float* y, cudaStream_t stream) {
  dispatch(shape, x, w, bias, y, stream);
}

const std::string& Gemm::library() const { return plans_->library.info(); }
bool Gemm::has_library() const { return plans_->library.there(); }
void Gemm::force(GemmPath path) { plans_->forced = path; }
GemmPath Gemm::last_path() const { return plans_->last; }

}  // namespace refit::cuda
