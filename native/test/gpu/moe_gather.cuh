// Ranks that gather the experts' activations, one after the other on one GPU, against one rank alone.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "test/gpu/moe_reference.cuh"

namespace refit::test {

// One of the ranks: its shares of the weights, and what it computes.
class GatheringRank {
 public:
  GatheringRank(const MoeShape& whole, int rank, int ranks, Problem& problem)
      : shape_(whole), rank_(rank), w13_(problem.w13.size() / ranks), w2_(problem.w2.size() / ranks) {
    shape_.inter = whole.inter / ranks, shape_.gathered = ranks;
    const std::vector<Element> w13 = problem.w13.get(), w2 = problem.w2.get();
    std::vector<Element> own13, own2;
    // Blocks of rows: gate and up of each expert, and each expert's w2.
    const auto rows = [&](const std::vector<Element>& from, int64_t blocks, int64_t cols, std::vector<Element>& to) {
      const auto block = static_cast<int64_t>(from.size()) / blocks, own = block / cols / ranks * cols;
      for (int64_t b = 0; b < blocks; b++)
        to.insert(to.end(), from.begin() + b * block + rank * own, from.begin() + b * block + (rank + 1) * own);
    };
    rows(w13, int64_t{2} * whole.experts, whole.hidden, own13);
    rows(w2, whole.experts, whole.inter, own2);
    w13_.put(own13), w2_.put(own2);
  }

  // Gathers from `all`, which have run before; the first run of each has no others and fills its own activations only.
  std::vector<std::vector<Element>> run(Gemm& gemm, const Case& c, ExpertKernel kernel, Problem& problem,
                                        const std::vector<GatheringRank*>& all) {
    const int64_t turn = c.turn > 0 ? c.turn : c.tokens;
    const size_t bytes = Moe::scratch_bytes(shape_, turn);
    Buffer<uint8_t> scratch(bytes);
    Moe moe(shape_, gemm, scratch.data(), bytes);
    moe.force(kernel);
    Buffer<Element> part(c.tokens * std::max(shape_.per_token * shape_.inter, shape_.outputs()));
    Buffer<Element> y(c.tokens * shape_.hidden);
    std::vector<std::vector<Element>> acts, outputs;
    const cuda::RowGather gather{
        [&] { return part.data(); },
        [&](Element* to, int64_t count, int64_t columns) {
          synchronize("a gather");
          const bool is_act = acts.size() == outputs.size();
          (is_act ? acts : outputs).push_back(part.get(count * columns));
          if (!is_act || all.empty()) return;
          std::vector<Element> joined(count * columns * all.size());
          for (size_t r = 0; r < all.size(); r++) {
            const std::vector<Element>& from = all[r]->acts_.at(acts.size() - 1);
            for (int64_t i = 0; i < count * columns; i++)
              joined[(i / columns * all.size() + r) * columns + i % columns] = from.at(i);
          }
          check(cudaMemcpy(to, joined.data(), joined.size() * sizeof(Element), cudaMemcpyHostToDevice), "gather");
        }};
    moe.run(problem.x.data(), problem.router.data(), w13_.data(), w2_.data(), y.data(), c.tokens, false, nullptr, {},
            {}, nullptr, &gather);
    synchronize("ranks that gather");
    part.check_guards("a part", "ranks that gather");
    scratch.check_guards("the scratch", "ranks that gather");
    if (all.empty()) acts_ = acts;
    return outputs;
  }

 private:
  MoeShape shape_;
  int rank_;
  Buffer<Element> w13_, w2_;
  std::vector<std::vector<Element>> acts_;  // by turn
};

// The same bits as one rank, from each kernel that sums in ascending order.
inline void check_gathering(Gemm& gemm, const Case& c, int ranks, uint64_t seed) {
  Problem problem(c, seed);
  const int64_t turn = c.turn > 0 ? c.turn : c.tokens, hidden = c.shape.hidden;
  const size_t bytes = Moe::scratch_bytes(c.shape, turn);
  Buffer<uint8_t> scratch(bytes);
  Buffer<Element> y(c.tokens * hidden);
  Moe moe(c.shape, gemm, scratch.data(), bytes);
  for (const ExpertKernel kernel : c.kernels) {
    const std::string what = c.text(kernel, false) + " on " + std::to_string(ranks) + " ranks that gather";
    moe.force(kernel);
    moe.run(problem.x.data(), problem.router.data(), problem.w13.data(), problem.w2.data(), y.data(), c.tokens, false,
            nullptr);
    synchronize(what.c_str());
    const std::vector<Element> expected = y.get();
    std::vector<std::unique_ptr<GatheringRank>> own;
    std::vector<GatheringRank*> all;
    for (int rank = 0; rank < ranks; rank++) {
      own.push_back(std::make_unique<GatheringRank>(c.shape, rank, ranks, problem));
      all.push_back(own.back().get());
      own.back()->run(gemm, c, kernel, problem, {});
    }
    int64_t differ = 0, count = 0;
    for (int rank = 0; rank < ranks; rank++) {
      const int64_t columns = hidden / ranks;
      int64_t token = 0;
      for (const std::vector<Element>& rows : own[rank]->run(gemm, c, kernel, problem, all)) {
        for (size_t i = 0; i < rows.size(); i++, count++) {
          const int64_t at = (token + static_cast<int64_t>(i) / columns) * hidden + rank * columns + i % columns;
          differ += std::memcmp(&rows[i], &expected.at(at), sizeof(Element)) != 0;
        }
        token += static_cast<int64_t>(rows.size()) / columns;
      }
    }
    CHECKF(differ == 0 && count == c.tokens * hidden, "%s: %lld of %lld elements have other bits", what.c_str(),
           static_cast<long long>(differ), static_cast<long long>(count));
  }
}

}  // namespace refit::test
