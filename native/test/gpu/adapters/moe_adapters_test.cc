// moe_adapters_test [--quick] [--seed N]: the products of experts' adapters with all sizes of row tiles against double
// on the host.
#include <numeric>

#include "cuda/moe/moe_kernels.h"
#include "test/gpu/adapters/adapters_world.cuh"

namespace refit::test {
namespace {

using cuda::MoeAdapters;
using cuda::MoeScratch;
using cuda::MoeShape;

struct Case {
  MoeShape shape;
  int64_t tokens;
  int tile_rows, slots;
  std::string text() const {
    return std::to_string(shape.experts) + " experts, " + std::to_string(shape.hidden) + " x " +
           std::to_string(shape.inter) + ", rank " + std::to_string(shape.adapter_rank) + ", " +
           std::to_string(tokens) + " tokens, tiles of " + std::to_string(tile_rows);
  }
};

// Numbers of the experts' adapters, as Adapters makes them for one linear.
struct ExpertHalf {
  ExpertHalf(Random& random, const MoeShape& s, int slots, const std::vector<float>& table, int first, int slices,
             int64_t K, int64_t N)
      : a(static_cast<size_t>(slots * s.experts * slices * s.adapter_rank * K)),
        b(static_cast<size_t>(slots * s.experts * slices * N * s.adapter_rank)) {
    const int R = s.adapter_rank;
    size_t at_a = 0, at_b = 0;
    for (int slot = 0; slot < slots; slot++) {
      for (int e = 0; e < s.experts; e++) {
        for (int i = 0; i < slices; i++) {
          const int own = static_cast<int>(table[static_cast<size_t>(slot * 3 + first + i) * 2 + 1]);
          for (int r = 0; r < R; r++) {
            for (int64_t k = 0; k < K; k++) a[at_a++] = Adapters::number(random, r, own);
          }
          for (int64_t n = 0; n < N; n++) {
            for (int r = 0; r < R; r++) b[at_b++] = Adapters::number(random, r, own);
          }
        }
      }
    }
    gpu_a.put(a), gpu_b.put(b);
  }
  std::vector<Element> a, b;
  Buffer<Element> gpu_a{a.size()}, gpu_b{b.size()};
};

template <class T>
std::vector<T> read(const T* from, int64_t count) {
  std::vector<T> out(static_cast<size_t>(count));
  check(cudaMemcpy(out.data(), from, out.size() * sizeof(T), cudaMemcpyDeviceToHost), "read");
  return out;
}
template <class T>
void write(T* to, const std::vector<T>& values) {
  check(cudaMemcpy(to, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "write");
}

class Test {
 public:
  Test(const Case& c, uint64_t seed) : c_(c), random_(seed), pairs_(c.tokens * c.shape.per_token) {
    for (int slot = 0; slot < c.slots; slot++) {
      for (int i = 0; i < 3; i++) {
        const int own = random_.chance(4) ? 0 : 1 + static_cast<int>(random_.below(s_.adapter_rank));
        table_.insert(table_.end(), {0.25f + static_cast<float>(random_.below(50)) / 25, static_cast<float>(own)});
      }
    }
    slots_ = random_slots(random_, c.tokens, c.slots, c.tokens < 20 ? 3 : 40);
  }

  void run() {
    ExpertHalf up(random_, s_, c_.slots, table_, 0, 2, s_.hidden, s_.inter);
    ExpertHalf down(random_, s_, c_.slots, table_, 2, 1, s_.inter, s_.hidden);
    Buffer<float> table(table_.size());
    Buffer<int32_t> slots(slots_.size());
    table.put(table_), slots.put(slots_);
    const MoeAdapters adapters{up.gpu_a.data(), up.gpu_b.data(), down.gpu_a.data(), down.gpu_b.data(), table.data(), 6,
                               slots.data()};
    Buffer<uint8_t> memory(cuda::carve_moe_scratch(s_, c_.tokens, nullptr).bytes);
    scratch_ = cuda::carve_moe_scratch(s_, c_.tokens, memory.data());
    write(scratch_.logits, numbers(c_.tokens * s_.experts));
    cuda::choose_experts(s_, scratch_, c_.tokens, nullptr);
    cuda::sort_by_expert(s_, scratch_, c_.tokens, c_.tile_rows, nullptr);
    synchronize("the sort");
    sort();
    const std::vector<Element> x = numbers(c_.tokens * s_.hidden), act = numbers(pairs_ * s_.inter);
    Buffer<Element> gpu_x(x.size());
    gpu_x.put(x);
    cuda::adapt_gate_up(s_, scratch_, adapters, gpu_x.data(), c_.tokens, c_.tile_rows, nullptr);
    synchronize("gate and up");
    check_part<float>(up, 0, 2, s_.hidden, s_.inter, x, true, std::vector<float>(pairs_ * 2 * s_.inter, 0.0f),
                      read(scratch_.delta, pairs_ * 2 * s_.inter));
    write(scratch_.act, act);
    check_down<Element>(down, adapters, act, false);
    check_down<float>(down, adapters, act, true);
    memory.check_guards("the scratch", c_.text());
  }

 private:
  std::vector<Element> numbers(int64_t count) {
    std::vector<Element> out(static_cast<size_t>(count));
    for (Element& v : out) v = to_element(static_cast<float>(random_.below(2001) - 1000) / 500);
    return out;
  }
  // The token and the expert of each slot of the sorted pairs.
  void sort() {
    const auto ids = read(scratch_.ids, pairs_), places = read(scratch_.slots, pairs_);
    token_.resize(static_cast<size_t>(pairs_)), expert_.resize(static_cast<size_t>(pairs_));
    for (int64_t i = 0; i < pairs_; i++) {
      token_[places[i]] = static_cast<int>(i / s_.per_token);
      expert_[places[i]] = ids[i];
    }
  }
  template <class Out>
  void check_down(ExpertHalf& half, const MoeAdapters& adapters, const std::vector<Element>& act, bool partial) {
    std::vector<Out> before;
    for (const Element v : numbers(pairs_ * s_.hidden)) before.push_back(Out(value_of(v)));
    write(static_cast<Out*>(scratch_.out), before);
    cuda::adapt_down(s_, scratch_, adapters, c_.tokens, partial, c_.tile_rows, nullptr);
    synchronize("down");
    check_part<Out>(half, 2, 1, s_.inter, s_.hidden, act, false, before,
                    read(static_cast<Out*>(scratch_.out), pairs_ * s_.hidden));
  }
  // x by token (gather) or by slot of the pair. The products with A are taken from the GPU's own, after a check.
  template <class Out>
  void check_part(const ExpertHalf& half, int first, int slices, int64_t K, int64_t N, const std::vector<Element>& x,
                  bool gather, const std::vector<Out>& before, const std::vector<Out>& after) {
    const int R = s_.adapter_rank;
    const auto t = read(scratch_.shrunk, pairs_ * slices * R);
    const std::string what = c_.text() + (gather ? ", gate and up" : ", down");
    for (int64_t p = 0; p < pairs_; p++) {
      const int slot = slots_[token_[p]];
      for (int i = 0; i < slices; i++) {
        const float* const entry = slot < 0 ? nullptr : &table_[static_cast<size_t>(slot * 3 + first + i) * 2];
        const int own = entry == nullptr ? 0 : static_cast<int>(entry[1]);
        const int64_t matrix = (int64_t{slot} * s_.experts + expert_[p]) * slices + i;
        for (int r = 0; r < own; r++) {
          Sum sum;
          for (int64_t k = 0; k < K; k++)
            sum.add(value_of(x[(gather ? token_[p] : p) * K + k]), value_of(half.a[(matrix * R + r) * K + k]));
          const double got = value_of(t[(p * slices + i) * R + r]);
          const double most = std::abs(sum.value) * kElementError + kElementQuantum + sum.size * kSumError;
          if (!CHECKF(std::abs(got - sum.value) <= most, "%s: t of pair %ld is %g, expected %g", what.c_str(),
                      static_cast<long>(p), got, sum.value))
            return;
        }
        for (int64_t n = 0; n < N; n++) {
          const double was = double{float(before[(p * slices + i) * N + n])};
          Sum sum;
          for (int r = 0; r < own; r++) {
            sum.add(double{entry[0]} * value_of(t[(p * slices + i) * R + r]),
                    value_of(half.b[(matrix * N + n) * R + r]));
          }
          const double got = double{float(after[(p * slices + i) * N + n])}, want = was + sum.value;
          const double most = own == 0 ? 0
                                       : (sizeof(Out) == 2 ? std::abs(want) * kElementError + kElementQuantum : 0.0) +
                                             (std::abs(was) + sum.size) * kSumError;
          if (!CHECKF(std::abs(got - want) <= most, "%s: pair %ld has %g, expected %g", what.c_str(),
                      static_cast<long>(p), got, want))
            return;
        }
      }
    }
  }

  const Case c_;
  const MoeShape& s_ = c_.shape;
  Random random_;
  const int64_t pairs_;
  std::vector<float> table_;  // of gate, up and down in each slot
  std::vector<int32_t> slots_;
  MoeScratch scratch_{};
  std::vector<int> token_, expert_;
};

int run(int argc, char** argv) {
  const Options options = parse(argc, argv);
  cuda::prepare_moe_route();
  cuda::prepare_moe_adapters();
  uint64_t seed = options.seed;
  for (const int64_t tokens : options.quick ? std::vector<int64_t>{9, 40} : std::vector<int64_t>{1, 9, 70, 300}) {
    for (const int tile_rows : {8, 16, 64, 128, 256}) {
      for (const int rank : {16, 48}) {
        MoeShape shape{8, 2, true, 72, 40};
        shape.adapter_rank = rank;
        Test({shape, tokens, tile_rows, 3}, seed++).run();
      }
    }
    MoeShape odd{5, 3, true, 70, 36};
    odd.adapter_rank = 32;
    Test({odd, tokens, 64, 4}, seed++).run();
  }
  if (!options.quick) {
    MoeShape large{16, 4, true, 2048, 768};
    large.adapter_rank = 32;
    Test({large, 40, 16, 2}, seed++).run();
    Test({large, 40, 64, 2}, seed++).run();
  }
  return finish("moe_adapters_test");
}

}  // namespace
}  // namespace refit::test

int main(int argc, char** argv) {
  try {
    return refit::test::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "moe_adapters_test: %s\n", error.what());
    return 1;
  }
}
