#include "cuda/gemm/gemm.h"

#include "cuda/device/current_gpu.h"
#include "cuda/gemm/cublas_lt.h"
#include "cuda/gemm/gemm_kernels.h"
#include "cuda/gemm/gemm_order.h"

namespace refit::cuda {
namespace {

// Up to this many rows the streaming kernel is preferred to cuBLASLt.
constexpr int64_t kStreamRowsByChoice = 16;
static_assert(kStreamRowsByChoice <= kStreamMaxRows);

}  // namespace

struct Gemm::Plans {
  Plans(void* workspace, size_t bytes, SumOrder order)
      : library(workspace, bytes, order),
        order(order),
        workspace(workspace),
        bytes(bytes),
        processors(multiprocessors()) {
    if (order == SumOrder::kAscending) library.require_loaded();
  }

  bool may_take(GemmPath path) const { return forced == GemmPath::kAuto || forced == path; }
  bool streams(const Product& p) const {
    const int64_t most = forced == GemmPath::kAuto ? kStreamRowsByChoice : kStreamMaxRows;
    if (order == SumOrder::kAscending && forced == GemmPath::kAuto) return false;
    return may_take(GemmPath::kStream) && p.shape.m <= most && stream_takes(p.shape, p.x, p.w);
  }
  template <class Out>
  void run_own(const Product& p, bool streamed, cudaStream_t stream) const {
    auto* const y = static_cast<Out*>(p.y);
    if (streamed) {
      stream_gemm(p.shape, p.x, p.w, p.bias, y, stream);
    } else {
      tile_gemm(p.shape, p.x, p.w, p.bias, y, processors, stream);
    }
  }

  // Chooses the first of the library's algorithms that sums as the tiled kernel does.
  void choose(const Product& p, cudaStream_t stream) {
    const OrderSample sample(p, workspace, bytes, stream);
    if (sample.product().shape.n == 0) return library.refuse(p);
    run_tile(sample.product(), stream);
    const uint64_t expected = sample.digest();
    library.choose(
        p, sample.product(),
        [&](const CublasLt::Launch& launch) {
          sample.clear();
          return launch() && sample.digest() == expected;
        },
        stream);
  }
  void run_tile(const Product& p, cudaStream_t stream) const {
    if (p.wide) {
      run_own<float>(p, false, stream);
    } else {
      run_own<Element>(p, false, stream);
    }
  }

  CublasLt library;
  const SumOrder order;
  void* const workspace;  // for samples, too: the library needs none with SumOrder::kAscending
  const size_t bytes;
  const int processors;
  GemmPath forced = GemmPath::kAuto, last = GemmPath::kAuto;
};

Gemm::Gemm(void* workspace, size_t workspace_bytes, SumOrder order)
    : plans_(std::make_unique<Plans>(workspace, workspace_bytes, order)) {
  prepare_stream_gemm();
  prepare_tile_gemm();
}

Gemm::~Gemm() = default;

void Gemm::run(const Product& p, cudaStream_t stream) {
  if (p.shape.m <= 0 || p.shape.n <= 0) return;
  const bool streamed = plans_->streams(p);
  if (!streamed && plans_->may_take(GemmPath::kLibrary) && plans_->library.run(p, stream)) {
    plans_->last = GemmPath::kLibrary;
    return;
  }
  plans_->last = streamed ? GemmPath::kStream : GemmPath::kTile;
  if (p.wide) {
    plans_->run_own<float>(p, streamed, stream);
  } else {
    plans_->run_own<Element>(p, streamed, stream);
  }
}

void Gemm::load(const Product& p, cudaStream_t stream) {
  if (p.shape.m <= 0 || p.shape.n <= 0 || plans_->streams(p) || !plans_->may_take(GemmPath::kLibrary)) return;
  if (plans_->order == SumOrder::kAscending && plans_->library.wants_choice(p)) plans_->choose(p, stream);
  plans_->library.load(p, stream);
}

void Gemm::require_loaded() { plans_->library.require_loaded(); }

const std::string& Gemm::library() const { return plans_->library.info(); }
SumOrder Gemm::order() const { return plans_->order; }
bool Gemm::has_library() const { return plans_->library.there(); }
void Gemm::force(GemmPath path) { plans_->forced = path; }
GemmPath Gemm::last_path() const { return plans_->last; }

}  // namespace refit::cuda
