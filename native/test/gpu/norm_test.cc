// Norms after attention and MLP (norm_add), and the statistics of norms over whole projections. Two kinds of numbers:
// small integers, whose sums of squares are exact in any order, so the CPU's bits are required; and random numbers,
// compared with double precision within the roundings of the formula.
#include "cpu/norm.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "cuda/forward/elementwise.h"
#include "test/gpu/elementwise_common.cuh"

using namespace refit;
using namespace refit::test;

namespace {

constexpr float kEps = 1e-5f;

// Integers in [-8, 8] by position: no two rows or neighbouring columns are alike.
Values integers(int64_t rows, int64_t columns, int64_t code) {
  Values v(static_cast<size_t>(rows * columns));
  for (int64_t i = 0; i < rows * columns; ++i) {
    const int64_t row = i / columns, column = i % columns;
    v[i] = to_element(static_cast<float>((row * 5 + column * 7 + column / 17 + code) % 17 - 8));
  }
  return v;
}

struct Case {
  int count, hidden;
  bool bias, round_once, exact;
  int64_t offset;
  std::string name() const {
    return std::to_string(count) + " x " + std::to_string(hidden) + (bias ? " bias" : "") +
           (round_once ? " round once" : "") + (exact ? " integers" : "") + " offset " + std::to_string(offset);
  }
};

struct Operands {
  Values residual, delta, bias, weight;
  explicit Operands(const Case& c) {
    const int64_t n = static_cast<int64_t>(c.count) * c.hidden;
    residual = random_values(n, 2.0f), weight = random_values(c.hidden, 1.0f);
    delta = c.exact ? integers(c.count, c.hidden, 0) : random_values(n, 1.0f);
    bias = c.exact ? integers(1, c.hidden, 3) : random_values(c.hidden, 0.5f);
  }
};

// |got - (x + y)| for y = d * rstd * weight in double. Every rounding to Element adds at most kElementError of its
// value, or half a quantum: one or two of y (the first before the product with the weight), one of the sum. The fp32
// operations, the sum of squares among them, stay below 2^-18 together.
void check_against_double(const std::string& what, const Case& c, const Operands& in, const Values& got) {
  const double roundings = (c.round_once ? 1 : 2) * kElementError + 0x1p-18;
  int64_t wrong = 0, first = 0;
  double worst = 0;
  for (int64_t row = 0; row < c.count; ++row) {
    std::vector<double> d(c.hidden);
    double squares = 0;
    for (int i = 0; i < c.hidden; ++i) {
      const float delta = to_float(in.delta[row * c.hidden + i]);
      // The sum with the bias is rounded, and its bits are determined.
      d[i] = c.bias ? to_float(to_element(delta + to_float(in.bias[i]))) : delta;
      squares += d[i] * d[i];
    }
    const double rstd = 1 / std::sqrt(squares / c.hidden + static_cast<double>(kEps));
    for (int i = 0; i < c.hidden; ++i) {
      const int64_t at = row * c.hidden + i;
      const double y = d[i] * rstd * to_float(in.weight[i]);
      const double of_first = c.round_once ? 0 : kElementQuantum * std::abs(to_float(in.weight[i]));
      const double expected = to_float(in.residual[at]) + y, of_y = std::abs(y) * roundings + of_first;
      const double bound = of_y + kElementError * (std::abs(expected) + of_y) + 2 * kElementQuantum + 1e-37;
      const double error = std::abs(to_float(got[at]) - expected);
      worst = std::max(worst, error / bound);
      if (!(error <= bound) && wrong++ == 0) first = at;
    }
  }
  CHECKF(wrong == 0, "%s: %lld elements are wrong, up to %.3g of the bound; first at row %lld, column %lld: got %.9g",
         what.c_str(), static_cast<long long>(wrong), worst, static_cast<long long>(first / c.hidden),
         static_cast<long long>(first % c.hidden), to_float(got[first]));
}

void test_norm_add(Cpu& cpu, const Case& c) {
  const std::string what = "norm_add " + c.name();
  cpu.ctx.round_once = c.round_once;
  const Operands in(c);
  Place residual(in.residual, c.offset), delta(in.delta, c.offset), bias(in.bias, c.offset);
  Place weight(in.weight, c.offset);
  Element* const bias_or_none = c.bias ? bias.data() : nullptr;
  const auto run = [&](Element* x, const Element* d, int count) {
    cuda::norm_add(x, d, bias_or_none, weight.data(), kEps, count, c.hidden, nullptr, c.round_once);
    synchronize(what.c_str());
  };
  // A second call adds a second delta to what the first one left: the residual is in place.
  std::vector<float> h = widened(in.residual);
  const std::vector<float> bias_floats = widened(in.bias), weight_floats = widened(in.weight);
  for (const char* call : {": first call", ": second call"}) {
    const Values before = residual.get(what);
    std::vector<float> parts = widened(in.delta);
    float* part = parts.data();
    cpu::norm_and_add(cpu.ctx, h.data(), &part, 1, c.bias ? bias_floats.data() : nullptr, weight_floats.data(), c.count,
                      c.hidden, kEps);
    run(residual.data(), delta.data(), c.count);
    const Values got = residual.get(what);
    if (c.exact) check_bits(what + call, got, h, c.hidden);
    Operands now = in;
    now.residual = before;
    check_against_double(what + call, c, now, got);
  }
  check_bits(what + ": delta is only read", delta.get(what), widened(in.delta), c.hidden);
  check_bits(what + ": weight is only read", weight.get(what), widened(in.weight), c.hidden);
  check_bits(what + ": bias is only read", bias.get(what), widened(in.bias), c.hidden);

  // A row's bits do not depend on the other rows.
  if (c.count < 2 || c.offset != 0 || c.hidden % 8 != 0) return;
  const int64_t last = static_cast<int64_t>(c.count - 1) * c.hidden;
  Place all(in.residual, 0), alone(Values(in.residual.begin() + last, in.residual.end()), 0);
  run(all.data(), delta.data(), c.count);
  run(alone.data(), delta.data() + last, 1);
  const Values got = all.get(what);
  check_bits(what + ": the last row alone", alone.get(what), widened(Values(got.begin() + last, got.end())), c.hidden);
}

struct Projection {
  int count, ranks, replicas;     // replicas: ranks that hold the same KV heads
  int heads, kv_heads, head_dim;  // of one rank
  bool exact;
  int64_t offset;
  std::string name() const {
    return std::to_string(count) + " tokens, " + std::to_string(ranks) + " ranks, " + std::to_string(replicas) +
           " replicas, heads " + std::to_string(heads) + ", kv heads " + std::to_string(kv_heads) + " of " +
           std::to_string(head_dim) + (exact ? " integers" : "") + " offset " + std::to_string(offset);
  }
  int64_t ld() const { return int64_t{heads + 2 * kv_heads} * head_dim; }
  cuda::HeadSquares of_rank(int rank) const {
    return {
        head_dim, ranks * heads, rank * heads, heads, rank / replicas * kv_heads, rank % replicas == 0 ? kv_heads : 0};
  }
  int all_heads() const { return ranks * heads; }
  int64_t k_elements() const { return int64_t{kv_heads} * head_dim * ranks / replicas; }
};

double squares_of(const Values& x, int64_t begin, int64_t n) {
  double sum = 0;
  for (int64_t i = begin; i < begin + n; ++i) {
    const double f = to_float(x[i]);
    sum += f * f;
  }
  return sum;
}

// The error of a fp32 sum of `n` positive terms: each passes at most n / 32 + 16 additions.
double sum_error(int64_t n) { return (static_cast<double>(n) / 32 + 16) * 0x1p-24; }

// The float that three pieces hold: in bf16 their sum; in fp16 they are integers, 11 of its bits each.
double held_by(const Element* pieces) {
  const float low = to_float(pieces[0]), middle = to_float(pieces[1]), high = to_float(pieces[2]);
  if (cuda::kElementType != DType::kFloat16) return static_cast<double>(low) + middle + high;
  const auto part = [](float piece) { return static_cast<uint32_t>(piece); };
  return std::bit_cast<float>(part(low) | part(middle) << 11 | part(high) << 22);
}

void check_pieces(const std::string& what, const Projection& p, int rank, const Values& qkv, const Values& pieces) {
  const cuda::HeadSquares own = p.of_rank(rank);
  for (int64_t i = 0; i < static_cast<int64_t>(pieces.size()); i += 3) {
    const int64_t token = i / (p.all_heads() * cuda::kSquarePieces);
    const int place = static_cast<int>(i / cuda::kSquarePieces % p.all_heads());
    const bool is_k = i % cuda::kSquarePieces != 0;
    const int head = place - (is_k ? own.first_kv_head : own.first_head);
    const bool empty = head < 0 || head >= (is_k ? own.counted_kv_heads : own.heads);
    const int64_t at = token * p.ld() + int64_t{is_k ? own.heads + head : head} * p.head_dim;
    const double expected = empty ? 0 : squares_of(qkv, at, p.head_dim);
    const double got = held_by(&pieces[i]);
    const double bound = p.exact ? 0 : expected * sum_error(p.head_dim);
    CHECKF(std::abs(got - expected) <= bound, "%s: token %lld, place %d, %s: expected %.17g within %.3g, got %.17g",
           what.c_str(), static_cast<long long>(token), place, is_k ? "k" : "q", expected, bound, got);
    // The all-reduce carries Elements: the sum of the pieces must be one fp32 number.
    CHECKF(got == static_cast<float>(got), "%s: %.17g is no fp32 number", what.c_str(), got);
  }
}

// Every rank's squares, their gather, and rstd from it, which is the same bits on one rank with all heads.
std::vector<float> test_projection(const Projection& p, const Values* all = nullptr) {
  const std::string what = "projection " + p.name();
  const int64_t row = static_cast<int64_t>(p.all_heads()) * cuda::kSquarePieces;
  std::vector<float> sums(p.count * row, 0.0f);
  std::vector<double> squares(2 * static_cast<size_t>(p.count), 0.0);
  std::vector<Values> qkv_of;
  for (int rank = 0; rank < p.ranks; ++rank) {
    const std::string at = what + ", rank " + std::to_string(rank);
    const cuda::HeadSquares own = p.of_rank(rank);
    const Values qkv = all != nullptr ? *all
                       : p.exact      ? integers(p.count, p.ld(), 3 * rank)
                                      : random_values(p.count * p.ld(), rank % 2 == 0 ? 1.0f : 0.01f);
    qkv_of.push_back(qkv);
    Place qkv_gpu(qkv, p.offset), pieces(p.count * row, 0);
    cuda::projection_squares(qkv_gpu.data(), p.ld(), own, p.count, pieces.data(), nullptr);
    synchronize(at.c_str());
    const Values got = pieces.get(at);
    check_pieces(at, p, rank, qkv, got);
    check_bits(at + ": qkv is only read", qkv_gpu.get(at), widened(qkv), p.ld());
    for (size_t i = 0; i < got.size(); ++i) sums[i] += to_float(got[i]);
    const int64_t q_cols = int64_t{p.heads} * p.head_dim, k_cols = int64_t{own.counted_kv_heads} * p.head_dim;
    for (int64_t t = 0; t < p.count; ++t) {
      squares[2 * t] += squares_of(qkv, t * p.ld(), q_cols);
      squares[2 * t + 1] += squares_of(qkv, t * p.ld() + q_cols, k_cols);
    }
  }
  Values gathered(sums.size());
  for (size_t i = 0; i < sums.size(); ++i) gathered[i] = to_element(sums[i]);
  check_bits(what + ": the gather is exact", gathered, sums, row);
  Place pieces(gathered, 0);
  Buffer<float> rstd(2 * p.count);
  const int64_t elements[] = {int64_t{p.all_heads()} * p.head_dim, p.k_elements()};
  cuda::projection_rstd(pieces.data(), p.all_heads(), elements[0], elements[1], kEps, p.count, rstd.data(), nullptr);
  synchronize(what.c_str());
  rstd.check_guards("rstd", what);
  const std::vector<float> got = rstd.get();
  for (size_t i = 0; i < got.size(); ++i) {
    const int64_t n = elements[i % 2];
    const double expected = 1 / std::sqrt(squares[i] / n + static_cast<double>(kEps));
    // Half of the sum's error, because of the root; then a division, a sum, a root and a division.
    const double bound = expected * ((p.exact ? 0 : sum_error(n)) / 2 + 4 * 0x1p-24);
    CHECKF(std::abs(got[i] - expected) <= bound, "%s: rstd of token %zu, %s: expected %.9g, got %.9g", what.c_str(),
           i / 2, i % 2 == 0 ? "q" : "k", expected, got[i]);
    if (!p.exact) continue;
    const float same = cpu::rstd_of(static_cast<float>(squares[i]), n, kEps);
    CHECKF(got[i] == same, "%s: rstd %zu: the CPU has %.9g, got %.9g", what.c_str(), i, same, got[i]);
  }
  if (p.ranks == 1) return got;
  // One rank with the heads of all.
  const int kv_heads = p.kv_heads * p.ranks / p.replicas;
  const Projection whole{p.count, 1, 1, p.all_heads(), kv_heads, p.head_dim, p.exact, 0};
  Values joined;
  for (int64_t t = 0; t < p.count; ++t) {
    const auto append = [&](int first, int heads, int step) {
      for (int rank = 0; rank < p.ranks; rank += step) {
        const auto from = qkv_of[rank].begin() + t * p.ld() + int64_t{first} * p.head_dim;
        joined.insert(joined.end(), from, from + int64_t{heads} * p.head_dim);
      }
    };
    append(0, p.heads, 1);
    append(p.heads, p.kv_heads, p.replicas);
    append(p.heads + p.kv_heads, p.kv_heads, p.replicas);
  }
  CHECKF(test_projection(whole, &joined) == got, "%s: one rank gives other bits", what.c_str());
  return got;
}

// A sum that is no finite number arrives as what it is.
void test_not_finite(float value) {
  const std::string what = "projection_squares of " + std::to_string(value);
  Values qkv(24, to_element(1.0f));
  qkv[3] = to_element(value);
  Place qkv_gpu(qkv, 0), pieces(cuda::kSquarePieces, 0);
  cuda::projection_squares(qkv_gpu.data(), 24, {8, 1, 0, 1, 0, 1}, 1, pieces.data(), nullptr);
  synchronize(what.c_str());
  const Values got = pieces.get(what);
  const float held = to_float(qkv[3]), square = held * held;
  const double of_q = held_by(got.data()), of_k = held_by(&got[3]);
  CHECKF(std::isnan(square) ? std::isnan(of_q) : of_q == square, "%s: got %g", what.c_str(), of_q);
  CHECKF(of_k == 8, "%s: got %g for k", what.c_str(), of_k);
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  rng.seed(options.seed);
  Cpu cpu;

  // One, two and four vectors per thread, more than that, odd widths, odd addresses.
  std::vector<int> widths{1, 3, 8, 64, 72, 100, 1024, 4096, 4097};
  if (!options.quick) widths.insert(widths.end(), {896, 2560, 5120, 7168, 8192, 8200, 12288, 16384, 16392});
  for (int hidden : widths) {
    for (int mask = 0; mask < 8; ++mask) {
      const bool bias = (mask & 1) != 0, round_once = (mask & 2) != 0, exact = (mask & 4) != 0;
      test_norm_add(cpu, {1 + static_cast<int>(below(5)), hidden, bias, round_once, exact, 0});
    }
    test_norm_add(cpu, {3, hidden, true, true, true, 1});
  }
  test_norm_add(cpu, {1, 4096, true, true, true, 0});
  if (!options.quick) test_norm_add(cpu, {700, 4096, true, true, false, 0});

  for (const bool exact : {true, false}) {
    test_projection({1, 1, 1, 32, 8, 128, exact, 0});
    test_projection({70, 2, 1, 2, 1, 64, exact, 0});
    test_projection({3, 4, 2, 2, 1, 24, exact, 8});
    test_projection({2, 8, 4, 5, 2, 256, exact, 0});  // more heads than a warp has lanes
    test_projection({9, 8, 8, 4, 1, 128, exact, 0});
    if (!options.quick) test_projection({1000, 1, 1, 40, 40, 128, exact, 0});
  }
  for (const float value : {1e30f, INFINITY, -INFINITY, NAN}) test_not_finite(value);
  return finish("norm");
}
