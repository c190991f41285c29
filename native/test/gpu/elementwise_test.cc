// The small kernels against native/cpu on the same inputs: bit for bit for elementwise arithmetic; norms up to the
// order of their sum.
#include "cuda/forward/elementwise.h"

#include <algorithm>
#include <cmath>

#include "cpu/norm.h"
#include "cpu/rope.h"
#include "cuda/forward/rope_table.h"
#include "test/gpu/elementwise_bench.cuh"
#include "test/gpu/elementwise_common.cuh"

using namespace refit;
using namespace refit::test;

namespace {

void test_embed(int count, int hidden, int64_t rows, int64_t first_row, int64_t offset) {
  const std::string what = "embed " + std::to_string(count) + " x " + std::to_string(hidden) + ", rows " +
                           std::to_string(first_row) + " + " + std::to_string(rows) + ", offset " +
                           std::to_string(offset);
  const Values table = random_values(rows * hidden, 1.0f);
  std::vector<int32_t> tokens(count);
  for (int32_t& t : tokens) t = static_cast<int32_t>(below(first_row + rows + 5));
  // Both ends of the table, and the tokens just outside.
  const int64_t ends[] = {first_row + rows - 1, first_row + rows, first_row, std::max<int64_t>(first_row - 1, 0)};
  for (int i = 0; i < std::min(count, 4); ++i) tokens[i] = static_cast<int32_t>(ends[i]);
  std::vector<float> expected(static_cast<size_t>(count) * hidden, 0.0f);
  for (int t = 0; t < count; ++t) {
    const int64_t row = tokens[t] - first_row;
    if (row < 0 || row >= rows) continue;
    for (int i = 0; i < hidden; ++i) expected[static_cast<size_t>(t) * hidden + i] = to_float(table[row * hidden + i]);
  }
  Place table_gpu(table, offset), out(static_cast<int64_t>(count) * hidden, 0);
  Buffer<int32_t> tokens_gpu(count);
  tokens_gpu.put(tokens);
  cuda::embed(tokens_gpu.data(), count, table_gpu.data(), first_row, rows, hidden, out.data(), nullptr);
  synchronize(what.c_str());
  check_bits(what, out.get(what), expected, hidden);
}

struct NormCase {
  int count, hidden;
  bool delta, bias, weight;
  int64_t offset;
  bool round_once = false;
};

void test_add_norm(Cpu& cpu, const NormCase& c) {
  const std::string what = "add_norm " + std::to_string(c.count) + " x " + std::to_string(c.hidden) +
                           (c.delta ? " delta" : "") + (c.bias ? " bias" : "") + (c.weight ? " weight" : "") +
                           " offset " + std::to_string(c.offset) + (c.round_once ? " round once" : "");
  cpu.ctx.round_once = c.round_once;
  const int64_t n = static_cast<int64_t>(c.count) * c.hidden;
  const float eps = 1e-5f;
  const Values residual = random_values(n, 2.0f), delta = random_values(n, 1.0f);
  const Values bias = random_values(c.hidden, 0.5f), weight = random_values(c.hidden, 1.0f);
  Place residual_gpu(residual, c.offset), delta_gpu(delta, c.offset), bias_gpu(bias, c.offset);
  Place weight_gpu(weight, c.offset), normed(n, c.offset);
  cuda::add_norm(residual_gpu.data(), c.delta ? delta_gpu.data() : nullptr, c.bias ? bias_gpu.data() : nullptr,
                 c.weight ? weight_gpu.data() : nullptr, eps, c.count, c.hidden, normed.data(), nullptr, c.round_once);
  synchronize(what.c_str());

  std::vector<float> h = widened(residual), parts = widened(delta), out(n);
  const std::vector<float> bias_floats = widened(bias), weight_floats = widened(weight);
  float* part = parts.data();
  cpu::add_and_norm(cpu.ctx, h.data(), &part, c.delta ? 1 : 0, c.bias ? bias_floats.data() : nullptr,
                    c.weight ? weight_floats.data() : nullptr, out.data(), c.count, c.hidden, eps);
  check_bits(what + ": residual", residual_gpu.get(what), h, c.hidden);
  const Values got = normed.get(what);
  if (c.weight) {
    check_norm(what, got, out, c.hidden);
  } else {
    for (const Element& x : got) CHECKF(bits(x) == 0xffff, "%s: normed was touched", what.c_str());
  }
  check_bits(what + ": delta is only read", delta_gpu.get(what), widened(delta), c.hidden);

  // A row's bits do not depend on the other rows.
  if (c.count < 2 || !c.weight || c.offset != 0) return;
  const int64_t last = c.count - 1;
  Place alone(Values(residual.end() - c.hidden, residual.end()), 0), alone_out(c.hidden, 0);
  cuda::add_norm(alone.data(), c.delta ? delta_gpu.data() + last * c.hidden : nullptr,
                 c.bias ? bias_gpu.data() : nullptr, weight_gpu.data(), eps, 1, c.hidden, alone_out.data(), nullptr,
                 c.round_once);
  synchronize(what.c_str());
  check_bits(what + ": the last row alone", alone_out.get(what), widened(Values(got.end() - c.hidden, got.end())),
             c.hidden);
}

void test_norm_rows(Cpu& cpu, int count, int hidden, int64_t source_rows, int64_t offset, bool round_once = false) {
  const std::string what = "norm_rows " + std::to_string(count) + " of " + std::to_string(source_rows) + " x " +
                           std::to_string(hidden) + " offset " + std::to_string(offset) +
                           (round_once ? " round once" : "");
  cpu.ctx.round_once = round_once;
  const Values x = random_values(source_rows * hidden, 3.0f), weight = random_values(hidden, 1.0f);
  const std::vector<float> weight_floats = widened(weight);
  std::vector<int32_t> rows(count);
  for (int32_t& row : rows) row = static_cast<int32_t>(below(source_rows));
  rows[0] = static_cast<int32_t>(source_rows - 1);
  Place x_gpu(x, offset), weight_gpu(weight, offset), out(static_cast<int64_t>(count) * hidden, offset);
  Buffer<int32_t> rows_gpu(count);
  rows_gpu.put(rows);
  cuda::norm_rows(x_gpu.data(), rows_gpu.data(), count, weight_gpu.data(), 1e-6f, hidden, out.data(), nullptr,
                  round_once);
  synchronize(what.c_str());
  const std::vector<float> all = widened(x);
  std::vector<float> expected(static_cast<size_t>(count) * hidden);
  for (int i = 0; i < count; ++i) {
    cpu::rms_norm(cpu.ctx, all.data() + static_cast<int64_t>(rows[i]) * hidden, weight_floats.data(),
                  expected.data() + static_cast<int64_t>(i) * hidden, hidden, 1e-6f);
  }
  check_norm(what, out.get(what), expected, hidden);
  check_bits(what + ": x is only read", x_gpu.get(what), all, hidden);
}

struct RopeCase {
  int count, heads, kv_heads, head_dim, page_size;
  bool q_norm, k_norm;
  bool is_whole = false;  // norms of whole projections, whose rstd is given
  bool round_once = false;
};

void test_rope(Cpu& cpu, const RopeCase& c) {
  const std::string what = "rope_and_cache " + std::to_string(c.count) + " tokens, heads " + std::to_string(c.heads) +
                           "/" + std::to_string(c.kv_heads) + ", dim " + std::to_string(c.head_dim) + ", page " +
                           std::to_string(c.page_size) + (c.q_norm ? ", q norm" : "") + (c.k_norm ? ", k norm" : "") +
                           (c.is_whole ? " of whole projections" : "") + (c.round_once ? ", round once" : "");
  cpu.ctx.round_once = c.round_once;
  const int dim = c.head_dim, units = c.heads + 2 * c.kv_heads, cols = units * dim, positions = 300;
  const float eps = 1e-6f;
  const Values qkv = random_values(static_cast<int64_t>(c.count) * cols, 1.0f);
  const int64_t q_cols = int64_t{c.heads} * dim, k_cols = int64_t{c.kv_heads} * dim;
  const Values q_norm = random_values(c.is_whole ? q_cols : dim, 1.0f);
  const Values k_norm = random_values(c.is_whole ? k_cols : dim, 1.0f);
  std::vector<float> rstd(2 * static_cast<size_t>(c.count));
  for (size_t i = 0; i < rstd.size(); ++i) rstd[i] = 0.3f + 0.01f * static_cast<float>(i % 97);

  ModelRecipe recipe;
  recipe.head_dim = dim;
  recipe.round_once = c.round_once;
  for (int i = 0; i < dim / 2; ++i) recipe.rope_inv_freq.push_back(std::pow(1e4, -2.0 * i / dim));
  cpu::Rope rope(recipe, cuda::kElementType);
  rope.reserve(positions);
  const std::vector<float> table = cuda::rope_table(recipe, 0, positions);
  std::vector<float> tmp(2 * static_cast<size_t>(units) * dim);

  const int pages = (c.count + c.page_size - 1) / c.page_size + 2;
  std::vector<int32_t> slots(static_cast<size_t>(pages) * c.page_size), position(c.count);
  for (size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<int32_t>(i);
  std::shuffle(slots.begin(), slots.end(), rng);
  slots.resize(c.count);
  for (int32_t& p : position) p = static_cast<int32_t>(below(positions));

  const int64_t cache = static_cast<int64_t>(pages) * c.kv_heads * c.page_size * dim;
  Place qkv_gpu(qkv, 0), q_norm_gpu(q_norm, 0), k_norm_gpu(k_norm, 0), k_gpu(cache, 0), v_gpu(cache, 0);
  Buffer<float> table_gpu(table.size()), rstd_gpu(rstd.size());
  Buffer<int32_t> position_gpu(c.count), slots_gpu(c.count);
  table_gpu.put(table);
  rstd_gpu.put(rstd);
  position_gpu.put(position);
  slots_gpu.put(slots);
  const cuda::HeadNorms norms{c.q_norm ? q_norm_gpu.data() : nullptr, c.k_norm ? k_norm_gpu.data() : nullptr, eps,
                              c.is_whole ? rstd_gpu.data() : nullptr};
  cuda::rope_and_cache(qkv_gpu.data(), norms, table_gpu.data(), position_gpu.data(), slots_gpu.data(), c.count, c.heads,
                       {k_gpu.data(), v_gpu.data(), pages, c.page_size, c.kv_heads, dim}, nullptr, c.round_once);
  synchronize(what.c_str());

  const Values got = qkv_gpu.get(what);
  std::vector<float> expected = widened(qkv);
  const std::vector<float> q_weight = widened(q_norm), k_weight = widened(k_norm);
  for (int t = 0; t < c.count; ++t) {
    float* x = expected.data() + static_cast<int64_t>(t) * cols;
    if (c.is_whole) {
      cpu::scale(cpu.ctx, x, rstd[2 * t], q_weight.data(), x, q_cols);
      cpu::scale(cpu.ctx, x + q_cols, rstd[2 * t + 1], k_weight.data(), x + q_cols, k_cols);
    }
    for (int i = 0; c.q_norm && !c.is_whole && i < c.heads; ++i)
      cpu::rms_norm(cpu.ctx, x + i * dim, q_weight.data(), x + i * dim, dim, eps);
    for (int i = c.heads; c.k_norm && !c.is_whole && i < c.heads + c.kv_heads; ++i)
      cpu::rms_norm(cpu.ctx, x + i * dim, k_weight.data(), x + i * dim, dim, eps);
    rope.apply(cpu.ctx, x, c.heads + c.kv_heads, position[t], tmp.data());
  }
  // With a given rstd no order of a sum is open.
  if (c.is_whole || (!c.q_norm && !c.k_norm)) {
    check_bits(what + ": qkv", got, expected, cols);
  } else {
    // A rotated element mixes two normed ones, each of which may be a step off, so the error is relative to the head.
    int64_t different = 0;
    for (int64_t i = 0; i < static_cast<int64_t>(got.size()); i += dim) {
      float size = 0;
      for (int d = 0; d < dim; ++d) size = std::max(size, std::abs(expected[i + d]));
      for (int d = 0; d < dim; ++d) {
        const float g = to_float(got[i + d]);
        different += bits(got[i + d]) != bits(to_element(expected[i + d]));
        CHECKF(std::abs(g - expected[i + d]) <= 0x1p-6f * size,
               "%s: token %lld, head %lld, d %d: expected %.9g, got %.9g", what.c_str(),
               static_cast<long long>(i / cols), static_cast<long long>(i % cols / dim), d, expected[i + d], g);
      }
    }
    CHECKF(different <= 4 + static_cast<int64_t>(got.size()) / 200, "%s: %lld of %zu elements are other bits",
           what.c_str(), static_cast<long long>(different), got.size());
  }

  // The cache contains qkv's current values in its slots, and is unchanged elsewhere.
  const Values k = k_gpu.get(what), v = v_gpu.get(what);
  Values k_expected(cache, element_of_bits(0xffff)), v_expected = k_expected;
  for (int t = 0; t < c.count; ++t) {
    for (int head = 0; head < c.kv_heads; ++head) {
      const int64_t row =
          (static_cast<int64_t>(slots[t] / c.page_size) * c.kv_heads + head) * c.page_size + slots[t] % c.page_size;
      const Element* from = got.data() + static_cast<int64_t>(t) * cols + (c.heads + head) * dim;
      std::copy_n(from, dim, k_expected.begin() + row * dim);
      std::copy_n(from + c.kv_heads * dim, dim, v_expected.begin() + row * dim);
    }
  }
  const auto same = [](const Element& a, const Element& b) { return bits(a) == bits(b); };
  const auto k_at = std::mismatch(k.begin(), k.end(), k_expected.begin(), same).first - k.begin();
  const auto v_at = std::mismatch(v.begin(), v.end(), v_expected.begin(), same).first - v.begin();
  CHECKF(k_at == cache, "%s: k of the cache differs at element %lld", what.c_str(), static_cast<long long>(k_at));
  CHECKF(v_at == cache, "%s: v of the cache differs at element %lld", what.c_str(), static_cast<long long>(v_at));
}

void test_activate_mul(Cpu& cpu, Activation activation, int64_t count, int64_t inter, int64_t offset, bool every_gate) {
  const std::string what = std::string(activation == Activation::kSilu ? "silu" : "gelu") + "_mul " +
                           std::to_string(count) + " x " + std::to_string(inter) + " offset " + std::to_string(offset);
  Values x = random_values(count * 2 * inter, 4.0f);
  if (every_gate) {
    for (int64_t i = 0; i < inter; ++i) x[i] = element_of_bits(static_cast<uint16_t>(i));
    for (int64_t i = 0; i < inter; ++i) x[inter + i] = to_element(1.0f);
  }
  Place x_gpu(x, offset), out(count * inter, offset);
  cuda::activate_mul(activation, x_gpu.data(), out.data(), count, inter, nullptr);
  synchronize(what.c_str());
  const std::vector<float> floats = widened(x), ones(inter, 1.0f);
  const auto activate_mul = activation == Activation::kSilu ? cpu.ctx.k.silu_mul : cpu.ctx.k.gelu_tanh_mul;
  std::vector<float> expected(count * inter);
  for (int64_t row = 0; row < count; ++row) {
    const float* gate = floats.data() + row * 2 * inter;
    float* to = expected.data() + row * inter;
    activate_mul(gate, ones.data(), to, inter);
    cpu.ctx.round(to, inter);
    for (int64_t i = 0; i < inter; ++i) to[i] *= gate[inter + i];
    cpu.ctx.round(to, inter);
  }
  Values got = out.get(what);
  // Any NaN is right.
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::isnan(expected[i]) && CHECK(std::isnan(to_float(got[i])))) {
      got[i] = to_element(0.0f);
      expected[i] = 0.0f;
    }
  }
  check_bits(what, got, expected, inter);
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  rng.seed(options.seed);
  Cpu cpu;
  std::printf("CPU kernels: %s\n", cpu.ctx.k.name);

  for (int hidden : {1, 7, 8, 64, 100, 2048, 4096}) {
    test_embed(4 + static_cast<int>(below(9)), hidden, 50, hidden % 2 == 0 ? 30 : 0, 0);
  }
  test_embed(5, 64, 20, 10, 1);

  // One, two and four vectors per thread, more than that, odd widths, odd addresses.
  std::vector<int> widths{1, 3, 8, 64, 72, 100, 1024, 4096, 4097};
  if (!options.quick) widths.insert(widths.end(), {896, 2560, 5120, 7168, 8192, 8200, 12288, 16384, 16392});
  for (int hidden : widths) {
    for (int mask = 0; mask < 8; ++mask) {
      const bool delta = (mask & 1) != 0, bias = (mask & 2) != 0, weight = (mask & 4) != 0;
      if ((bias && !delta) || (!delta && !weight)) continue;
      test_add_norm(cpu, {1 + static_cast<int>(below(5)), hidden, delta, bias, weight, 0});
    }
    test_add_norm(cpu, {3, hidden, true, true, true, 1});
    test_add_norm(cpu, {2, hidden, true, true, true, 0, true});
    test_norm_rows(cpu, 3, hidden, 7, 0, true);
    test_norm_rows(cpu, 1 + static_cast<int>(below(6)), hidden, 7, 0);
  }
  test_norm_rows(cpu, 4, 64, 7, 3);

  for (int dim : {8, 16, 24, 32, 64, 72, 80, 96, 112, 128, 192, 248, 256}) {
    for (int norms = 0; norms < 3; ++norms) {
      test_rope(cpu, {1 + static_cast<int>(below(20)), 1 + static_cast<int>(below(9)), 1 + static_cast<int>(below(3)),
                      dim, static_cast<int>(std::vector<int>{1, 7, 16, 64}[below(4)]), norms > 0, norms > 1});
    }
    for (const bool round_once : {false, true}) {
      test_rope(cpu, {13, 6, 2, dim, 7, false, false, false, round_once});
      test_rope(cpu, {13, 6, 2, dim, 7, true, true, false, round_once});
      test_rope(cpu, {13, 6, 3, dim, 16, true, true, true, round_once});
    }
    if (options.quick && dim >= 72) break;
  }
  if (!options.quick) {
    test_rope(cpu, {700, 32, 8, 128, 16, true, true});
    test_rope(cpu, {700, 32, 32, 128, 16, true, true, true, true});
  }

  for (const Activation act : {Activation::kSilu, Activation::kGeluTanh}) {
    for (int64_t inter : {1, 5, 8, 100, 768, 1000, 1024}) test_activate_mul(cpu, act, 1 + below(5), inter, 0, false);
    test_activate_mul(cpu, act, 3, 64, 1, false);
    test_activate_mul(cpu, act, 2, 65536, 0, true);  // every Element as a gate
    if (!options.quick) test_activate_mul(cpu, act, 65600, 8, 0, false);
  }

  Buffer<Element> some(64);
  Buffer<float> table(64);
  Buffer<int32_t> ids(1);
  for (int dim : {4, 12, 264}) {
    CHECK_THROWS(cuda::rope_and_cache(some.data(), {nullptr, nullptr, 1e-6f}, table.data(), ids.data(), ids.data(), 1,
                                      1, {some.data(), some.data(), 1, 1, 1, dim}, nullptr),
                 std::invalid_argument);
  }
  if (options.bench) bench_elementwise();
  return finish("elementwise");
}
