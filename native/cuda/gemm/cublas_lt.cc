#include "cuda/gemm/cublas_lt.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "cuda/device/dynamic.h"

namespace refit::cuda {
namespace {

constexpr const char* kSwitch = "REFIT_CUBLASLT";

// cudaDataType_t, cublasComputeType_t, cublasOperation_t
constexpr int kFloat = 0, kHalf = of_element(14, 2), kCompute32F = 68;
constexpr int32_t kTranspose = 1, kPlain = 0;
// cublasLtMatmulDescAttributes_t
constexpr int kDescTransA = 3, kDescTransB = 4, kDescEpilogue = 7, kDescBiasPointer = 8;
// cublasLtEpilogue_t
constexpr int32_t kEpilogueBias = 4;
// cublasLtMatmulPreferenceAttributes_t
constexpr int kPreferWorkspace = 1, kPreferReductions = 3, kPreferAlignment = 5;  // of A; of B, C and D follow
// cublasLtReductionScheme_t
constexpr uint32_t kNoReduction = 0, kFloatReduction = 2;
// cublasStatus_t
constexpr int kSuccess = 0, kInvalidValue = 7, kArchMismatch = 8, kNotSupported = 15;

struct Algo {
  uint64_t data[8];
};

struct Heuristic {
  Algo algo;
  size_t workspace_bytes;
  int state;
  float waves;
  int reserved[4];
};
static_assert(sizeof(Heuristic) == 96);

using Object = void*;  // descriptors of all kinds

// The largest power of two, at most 256, that divides the address.
int alignment(const void* p) {
  const auto address = reinterpret_cast<uintptr_t>(p) | 256;
  return static_cast<int>(address & (~address + 1));
}

bool refused(int status) { return status == kInvalidValue || status == kArchMismatch || status == kNotSupported; }

std::string version_text(size_t version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

void check(int status, const char* operation) {
  if (status != kSuccess)
    throw std::runtime_error(std::string(operation) + " returned status " + std::to_string(status));
}

}  // namespace

struct CublasLt::Api {
  Library library;
  size_t (*version)();
  int (*create)(void** handle);
  int (*destroy)(void* handle);
  int (*desc_create)(Object* desc, int compute, int scale);
  int (*desc_set)(Object desc, int attribute, const void* value, size_t bytes);
  int (*desc_destroy)(Object desc);
  int (*layout_create)(Object* layout, int type, uint64_t rows, uint64_t columns, int64_t ld);
  int (*layout_destroy)(Object layout);
  int (*preference_create)(Object* preference);
  int (*preference_set)(Object preference, int attribute, const void* value, size_t bytes);
  int (*preference_destroy)(Object preference);
  int (*heuristic)(void* handle, Object desc, Object a, Object b, Object c, Object d, Object preference, int wanted,
                   Heuristic* results, int* found);
  int (*matmul)(void* handle, Object desc, const void* alpha, const void* a, Object a_layout, const void* b,
                Object b_layout, const void* beta, const void* c, Object c_layout, void* d, Object d_layout,
                const Algo* algo, void* workspace, size_t workspace_bytes, cudaStream_t stream);

  // The name of the first missing function; null if all are there.
  const char* resolve() {
    const char* missing = nullptr;
    const auto find = [&](auto& function, const char* name) {
      void* const found = symbol(library, name);
      if (found == nullptr && missing == nullptr) missing = name;
      std::memcpy(&function, &found, sizeof found);
    };
    find(version, "cublasLtGetVersion");
    find(create, "cublasLtCreate");
    find(destroy, "cublasLtDestroy");
    find(desc_create, "cublasLtMatmulDescCreate");
    find(desc_set, "cublasLtMatmulDescSetAttribute");
    find(desc_destroy, "cublasLtMatmulDescDestroy");
    find(layout_create, "cublasLtMatrixLayoutCreate");
    find(layout_destroy, "cublasLtMatrixLayoutDestroy");
    find(preference_create, "cublasLtMatmulPreferenceCreate");
    find(preference_set, "cublasLtMatmulPreferenceSetAttribute");
    find(preference_destroy, "cublasLtMatmulPreferenceDestroy");
    find(heuristic, "cublasLtMatmulAlgoGetHeuristic");
    find(matmul, "cublasLtMatmul");
    return missing;
  }
};

// The descriptors of one kind of product. The library is column-major: its D [N, M] is our y, its A (transposed) is our
// w, its B is our x.
struct CublasLt::Plan {
  Object desc = nullptr, a = nullptr, b = nullptr, d = nullptr;
  Algo algo{};
  std::vector<Algo> candidates;  // until one is chosen
  bool usable = false, loaded = false;
};

CublasLt::CublasLt(void* workspace, size_t workspace_bytes, SumOrder order)
    : workspace_(workspace), workspace_bytes_(order == SumOrder::kAny ? workspace_bytes : 0), order_(order) {
  const char* const wish = std::getenv(kSwitch);
  if (wish != nullptr && std::strcmp(wish, "off") == 0) {
    info_ = std::string("cuBLASLt is off (") + kSwitch + "=off)";
    return;
  }
  auto api = std::make_unique<Api>();
  const bool named = wish != nullptr && *wish != '\0';
  api->library = open_library({"libcublasLt.so.13", "libcublasLt.so.12"}, named ? kSwitch : nullptr);
  if (api->library.handle == nullptr) {
    info_ = "cuBLASLt was not found; tried\n" + api->library.tried;
    return;
  }
  if (const char* missing = api->resolve()) {
    info_ = "cuBLASLt at " + api->library.path + " has no function " + missing;
    return;
  }
  const size_t version = api->version();
  const std::string name = "cuBLASLt " + version_text(version) + " (" + api->library.path + ")";
  if (version < 120000 || version >= 140000) {
    info_ = name + " is not used: versions 12 and 13 are known";
    return;
  }
  if (const int status = api->create(&handle_); status != kSuccess) {
    handle_ = nullptr;
    info_ = name + " is not used: cublasLtCreate returned status " + std::to_string(status);
    return;
  }
  info_ = name;
  api_ = std::move(api);
}

CublasLt::~CublasLt() {
  if (!there()) return;
  for (auto& [key, plan] : plans_) destroy(plan);
  api_->destroy(handle_);
}

void CublasLt::destroy(Plan& plan) const {
  if (plan.desc != nullptr) api_->desc_destroy(plan.desc);
  for (Object layout : {plan.a, plan.b, plan.d}) {
    if (layout != nullptr) api_->layout_destroy(layout);
  }
}

void CublasLt::describe(Plan& plan, const Key& key, const Element* bias) const {
  const auto& [m, n, k, ldx, ldy, wide, has_bias, align] = key;
  const auto columns = static_cast<uint64_t>(m), rows = static_cast<uint64_t>(n), depth = static_cast<uint64_t>(k);
  check(api_->desc_create(&plan.desc, kCompute32F, kFloat), "cublasLtMatmulDescCreate");
  check(api_->desc_set(plan.desc, kDescTransA, &kTranspose, sizeof kTranspose),
        "setting the first operand's transpose");
  check(api_->desc_set(plan.desc, kDescTransB, &kPlain, sizeof kPlain), "setting the second operand's transpose");
  if (has_bias) {
    check(api_->desc_set(plan.desc, kDescEpilogue, &kEpilogueBias, sizeof kEpilogueBias), "setting the epilogue");
    check(api_->desc_set(plan.desc, kDescBiasPointer, &bias, sizeof bias), "setting the bias");
  }
  check(api_->layout_create(&plan.a, kHalf, depth, rows, k), "cublasLtMatrixLayoutCreate");
  check(api_->layout_create(&plan.b, kHalf, depth, columns, ldx), "cublasLtMatrixLayoutCreate");
  check(api_->layout_create(&plan.d, wide ? kFloat : kHalf, rows, columns, ldy), "cublasLtMatrixLayoutCreate");
}

void CublasLt::find_algorithms(Plan& plan, int align) const {
  constexpr int kMostCandidates = 8;
  Object preference = nullptr;
  check(api_->preference_create(&preference), "cublasLtMatmulPreferenceCreate");
  const uint64_t most = workspace_bytes_;
  int status = api_->preference_set(preference, kPreferWorkspace, &most, sizeof most);
  const auto bytes = static_cast<uint32_t>(align);
  for (int operand = 0; operand < 4 && status == kSuccess; operand++) {
    status = api_->preference_set(preference, kPreferAlignment + operand, &bytes, sizeof bytes);
  }
  const bool any = order_ == SumOrder::kAny;
  // Parts of a sum in fp16 could exceed its largest number although the sum does not.
  const uint32_t reductions = any ? kFloatReduction : kNoReduction;
  if ((!any || kElementType == DType::kFloat16) && status == kSuccess) {
    status = api_->preference_set(preference, kPreferReductions, &reductions, sizeof reductions);
  }
  Heuristic best[kMostCandidates] = {};
  int found = 0;
  if (status == kSuccess) {
    status = api_->heuristic(handle_, plan.desc, plan.a, plan.b, plan.d, plan.d, preference, any ? 1 : kMostCandidates,
                             best, &found);
  }
  api_->preference_destroy(preference);
  if (!refused(status)) check(status, "cublasLtMatmulAlgoGetHeuristic");
  for (int i = 0; i < found && status == kSuccess; i++) {
    if (best[i].state == kSuccess && best[i].workspace_bytes <= workspace_bytes_)
      plan.candidates.push_back(best[i].algo);
  }
}

CublasLt::Plan* CublasLt::find(const Product& p) {
  const GemmShape& s = p.shape;
  // The library does not promise a bias whose type differs from y's for these types.
  if (!there() || s.m <= 0 || s.n <= 0 || s.k <= 0 || (p.wide && p.bias != nullptr)) return nullptr;
  int align = std::min({alignment(p.x), alignment(p.w), alignment(p.y)});
  if (p.bias != nullptr) align = std::min(align, alignment(p.bias));
  // Rows that do not begin at multiples of 16 bytes have slow algorithms at best. Two kinds of alignment keep the
  // number of plans small.
  if (align < 16 || s.k % 8 != 0 || s.ldx % 8 != 0 || s.ldy * (p.wide ? 4 : 2) % 16 != 0) return nullptr;
  const Key key{s.m, s.n, s.k, s.ldx, s.ldy, p.wide, p.bias != nullptr, align == 256 ? 256 : 16};
  const auto [at, is_new] = plans_.try_emplace(key);
  if (is_new) {
    describe(at->second, key, p.bias);
    find_algorithms(at->second, std::get<int>(key));
  }
  return &at->second;
}

bool CublasLt::wants_choice(const Product& p) {
  const Plan* const plan = find(p);
  return plan != nullptr && !plan->candidates.empty();
}

void CublasLt::choose(const Product& p, const Product& sample, const std::function<bool(const Launch&)>& accepts,
                      cudaStream_t stream) {
  Plan& plan = *find(p);
  const GemmShape& s = sample.shape;
  Plan trial;
  describe(trial, {s.m, s.n, s.k, s.ldx, s.ldy, sample.wide, sample.bias != nullptr, 0}, sample.bias);
  for (const Algo& algo : plan.candidates) {
    trial.algo = algo;
    if (!accepts([&] { return launch(trial, sample, stream); })) continue;
    plan.algo = algo;
    plan.usable = true;
    break;
  }
  destroy(trial);
  plan.candidates = {};
}

void CublasLt::refuse(const Product& p) { find(p)->candidates = {}; }

bool CublasLt::launch(Plan& plan, const Product& p, cudaStream_t stream) const {
  if (p.bias != nullptr) {
    check(api_->desc_set(plan.desc, kDescBiasPointer, &p.bias, sizeof p.bias), "setting the bias");
  }
  const float one = 1.0f, zero = 0.0f;
  const int status = api_->matmul(handle_, plan.desc, &one, p.w, plan.a, p.x, plan.b, &zero, p.y, plan.d, p.y, plan.d,
                                  &plan.algo, workspace_, workspace_bytes_, stream);
  if (refused(status)) return false;
  check(status, "cublasLtMatmul");
  return true;
}

bool CublasLt::run(const Product& p, cudaStream_t stream) {
  Plan* const plan = find(p);
  if (plan == nullptr) return false;
  if (requires_loaded_ && !plan->loaded && (plan->usable || !plan->candidates.empty())) {
    throw std::logic_error("a product of " + std::to_string(p.shape.m) + " x " + std::to_string(p.shape.n) + " x " +
                           std::to_string(p.shape.k) + " was not loaded before the step");
  }
  return run(*plan, p, stream);
}

void CublasLt::load(const Product& p, cudaStream_t stream) {
  Plan* const plan = find(p);
  if (plan != nullptr && !plan->loaded) run(*plan, p, stream);
}

bool CublasLt::run(Plan& plan, const Product& p, cudaStream_t stream) const {
  if (!plan.candidates.empty()) {
    plan.algo = plan.candidates.front();
    plan.usable = true;
    plan.candidates = {};
  }
  plan.usable = plan.usable && launch(plan, p, stream);
  plan.loaded = true;
  return plan.usable;
}

}  // namespace refit::cuda
