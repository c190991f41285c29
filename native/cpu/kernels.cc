#include "cpu/kernels.h"

#include <stdexcept>

#include "cpu/gemm/gemm.h"
#include "cpu/isa/isa.h"

namespace refit::cpu {

namespace {

std::vector<float> widened(const void* halves, int64_t n) {
  const auto* const from = static_cast<const uint16_t*>(halves);
  std::vector<float> out(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; i++) out[static_cast<size_t>(i)] = to_float(DType::kFloat16, from[i]);
  return out;
}

template <const GemmOps& Bf16, const GemmOps& F32>
void dispatch(Pool& pool, const float* x, int64_t ldx, const void* w, DType dtype, const void* bias, float* y,
              int64_t ldy, int64_t M, int64_t N, int64_t K) {
  if (dtype == DType::kFloat16) {
    // Only the reference of the GPU tests computes in float16, so this is short and not fast.
    const std::vector<float> wide = widened(w, N * K), wide_bias = widened(bias, bias == nullptr ? 0 : N);
    return gemm(F32, pool, x, ldx, wide.data(), bias == nullptr ? nullptr : wide_bias.data(), y, ldy, M, N, K);
  }
  gemm(dtype == DType::kBFloat16 ? Bf16 : F32, pool, x, ldx, w, bias, y, ldy, M, N, K);
}

template <const GemmOps& Bf16, const GemmOps& F32>
Kernels table(const char* name, const VectorOps& v) {
  return {name,         dispatch<Bf16, F32>, v.dot,       v.dot_bf16, v.axpy,          v.axpy_bf16, v.sum_squares,
          v.round_bf16, v.to_bf16,           v.from_bf16, v.silu_mul, v.gelu_tanh_mul, v.exp_sum,   v.max};
}

// Best first.
const std::vector<Kernels>& available() {
  // Never freed: a step may run while the process exits.
  static const auto& list = *new const std::vector<Kernels>([] {
    std::vector<Kernels> sets;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (avx512 && __builtin_cpu_supports("avx512bf16")) {
      sets.push_back(table<kGemmAvx512Dp, kGemmAvx512F32>("avx512bf16", kVectorAvx512));
    }
    if (avx512) sets.push_back(table<kGemmAvx512Bf16, kGemmAvx512F32>("avx512", kVectorAvx512));
    if (avx2) sets.push_back(table<kGemmAvx2Bf16, kGemmAvx2F32>("avx2", kVectorAvx2));
#endif
    sets.push_back(table<kGemmScalarBf16, kGemmScalarF32>("scalar", kVectorScalar));
    return sets;
  }());
  return list;
}

}  // namespace

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (const Kernels& k : available()) names.push_back(k.name);
  return names;
}

const Kernels& kernels(const std::string& isa) {
  if (isa.empty()) return available().front();
  std::string have;
  for (const Kernels& k : available()) {
    if (isa == k.name) return k;
    have += have.empty() ? k.name : std::string(", ") + k.name;
  }
  throw std::invalid_argument("instruction set \"" + isa + "\" is unknown or not on this machine, which has " + have);
}

}  // namespace refit::cpu
