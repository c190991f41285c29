// Random adapters in all slots of a test model: their parameters on each rank, and the model with an adapter merged
// into its weights.
#pragma once
#include <cmath>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/adapters.h"
#include "test/forward_reference.h"

namespace refit::test {

// One linear with adapters: `base` is its weight in TestModel, of which the table has `parts`, each [rows, cols] for
// one expert.
struct AdaptedLinearShape {
  std::string base, adapter;
  int table_row;
  std::vector<int64_t> rows;  // of each slice
  int64_t cols;
  int64_t experts = 1;
  bool splits_columns = false;  // among ranks; else rows
};

class SlotAdapters {
 public:
  SlotAdapters(const TestModel& model, int slots, int rank, uint32_t seed) : model_(model), slots_(slots), rank_(rank) {
    std::mt19937 rng(seed);
    list_linears();
    const int table_rows = kAdaptedLinears * model.v.layers + 2;
    table_.assign(static_cast<size_t>(slots) * table_rows * 2, 0.0f);
    for (int s = 0; s < slots; ++s) {
      for (const AdaptedLinearShape& linear : linears_) {
        for (size_t i = 0; i < linear.rows.size(); ++i) {
          float* const entry = &table_[(static_cast<size_t>(s) * table_rows + linear.table_row + i) * 2];
          entry[0] = 0.5f + static_cast<float>(rng() % 8) / 4;
          entry[1] = static_cast<float>(rng() % 6 == 0 ? 0 : 1 + rng() % rank);
        }
        make(rng, s, linear, table_rows);
      }
    }
  }

  void extend(CoreConfig& config) const {
    config.adapter_slots = slots_, config.adapter_rank = rank_;
    config.params.push_back({"adapters.table", static_cast<int64_t>(table_.size()) / 2, 2, DType::kFloat32});
    for (const AdaptedLinearShape& linear : linears_) {
      for (const char* half : {"_a", "_b"}) {
        const Matrix m = shard(linear, half, 0, config.ranks);
        config.params.push_back({"adapters." + linear.adapter + half, m.rows, m.cols, dtype()});
      }
    }
  }

  // A model in float32 has adapters in bf16.
  DType dtype() const { return model_.dtype == DType::kFloat16 ? DType::kFloat16 : DType::kBFloat16; }

  // The values of a parameter on a rank.
  std::vector<float> values(const std::string& name, int rank, int ranks) const {
    if (name == "adapters.table") return table_;
    for (const AdaptedLinearShape& linear : linears_) {
      for (const char* half : {"_a", "_b"}) {
        if (name == "adapters." + linear.adapter + half) return shard(linear, half, rank, ranks).x;
      }
    }
    return {};
  }

  // The model with the adapter of a slot added to its weights, in float32.
  TestModel merged(int slot) const {
    TestModel out = model_;
    const int table_rows = kAdaptedLinears * model_.v.layers + 2;
    for (const AdaptedLinearShape& linear : linears_) {
      Matrix& w = out.weights.at(linear.base);
      const Matrix &a = a_.at(linear.adapter)[slot], &b = b_.at(linear.adapter)[slot];
      int64_t row = 0, a_row = 0;
      for (int64_t e = 0; e < linear.experts; ++e) {
        for (size_t i = 0; i < linear.rows.size(); ++i, a_row += rank_) {
          const float* const entry = &table_[(static_cast<size_t>(slot) * table_rows + linear.table_row + i) * 2];
          for (int64_t n = 0; n < linear.rows[i]; ++n, ++row) {
            for (int64_t k = 0; k < linear.cols; ++k) {
              double sum = 0;
              for (int r = 0; r < static_cast<int>(entry[1]); ++r) sum += double{a.at(a_row + r, k)} * b.at(row, r);
              w.x[row * linear.cols + k] += static_cast<float>(entry[0] * sum);
            }
          }
        }
      }
    }
    return out;
  }

 private:
  void list_linears() {
    const Variant& v = model_.v;
    const int64_t h = v.hidden, q = int64_t{v.heads} * v.head_dim, kv = int64_t{v.kv_heads} * v.head_dim;
    for (int l = 0; l < v.layers; ++l) {
      const std::string p = "layers." + std::to_string(l) + ".";
      const int row = kAdaptedLinears * l;
      linears_.push_back({p + "qkv", p + "qkv", row + kAdaptQ, {q, kv, kv}, h});
      linears_.push_back({p + "o", p + "o", row + kAdaptO, {h}, q, 1, true});
      const bool sparse = model_.sparse(l);
      const int64_t inter = sparse ? v.expert_inter : v.inter, experts = sparse ? v.experts : 1;
      const std::string up = p + (sparse ? "w13" : "gate_up"), down = p + (sparse ? "w2" : "down");
      linears_.push_back({up, up, row + kAdaptGate, {inter, inter}, h, experts});
      linears_.push_back({down, down, row + kAdaptDown, {h}, inter, experts, true});
    }
    if (v.tied) return;  // one weight, two adapters: no model with merged weights is the same
    linears_.push_back({"embed", "embed", kAdaptedLinears * v.layers, {v.vocab}, h});
    linears_.push_back({"lm_head", "lm_head", kAdaptedLinears * v.layers + 1, {v.vocab}, h});
  }

  // The rank dimension is zero from the adapter's rank to the next multiple of 16, and anything behind it.
  void make(std::mt19937& rng, int slot, const AdaptedLinearShape& linear, int table_rows) {
    std::normal_distribution<float> normal;
    int64_t all = 0;
    for (const int64_t rows : linear.rows) all += rows;
    Matrix a{linear.experts * static_cast<int64_t>(linear.rows.size()) * rank_, linear.cols, {}};
    Matrix b{linear.experts * all, rank_, {}};
    const auto own = [&](size_t slice) {
      return static_cast<int>(table_[(static_cast<size_t>(slot) * table_rows + linear.table_row + slice) * 2 + 1]);
    };
    const auto number = [&](int r, int rank, float sd) {
      if (r >= rank && r < (rank + 15) / 16 * 16) return 0.0f;
      return round_to(dtype(), normal(rng) * (r < rank ? sd : 1e4f));
    };
    const float a_sd = 1.0f / std::sqrt(static_cast<float>(linear.cols));
    for (int64_t e = 0; e < linear.experts; ++e) {
      for (size_t i = 0; i < linear.rows.size(); ++i) {
        const float b_sd = 0.15f / std::sqrt(static_cast<float>(std::max(1, own(i))));
        for (int r = 0; r < rank_; ++r) {
          for (int64_t k = 0; k < linear.cols; ++k) a.x.push_back(number(r, own(i), a_sd * 2));
        }
        for (int64_t n = 0; n < linear.rows[i]; ++n) {
          for (int r = 0; r < rank_; ++r) b.x.push_back(number(r, own(i), b_sd));
        }
      }
    }
    a_[linear.adapter].push_back(std::move(a)), b_[linear.adapter].push_back(std::move(b));
  }

  // All slots' A or B, one after the other, as a rank holds it.
  Matrix shard(const AdaptedLinearShape& linear, const std::string& half, int rank, int ranks) const {
    const bool is_a = half == "_a", is_embed = linear.base == "embed";
    Matrix out;
    for (int s = 0; s < slots_; ++s) {
      Matrix full = (is_a ? a_ : b_).at(linear.adapter)[s];
      if (is_embed) full = embed_half(s, is_a);
      // A is split with the base weight's columns, B with its rows.
      if (is_embed ? is_a : is_a == (linear.splits_columns && !model_.gathers(ranks))) {
        TestModel split = model_;
        split.weights[linear.base] = full;
        full = split.shard(linear.base, rank, ranks);
      }
      out.rows += full.rows, out.cols = full.cols;
      out.x.insert(out.x.end(), full.x.begin(), full.x.end());
    }
    return out;
  }
  // The embedding is read by rows: its adapter's first product is a row of B [vocab, rank], its second is A [rank, H].
  // The engine names them the other way round: embed_a [vocab, rank], embed_b [H, rank].
  Matrix embed_half(int slot, bool is_a) const {
    if (is_a) return b_.at("embed")[slot];
    const Matrix& a = a_.at("embed")[slot];
    Matrix out{a.cols, a.rows, {}};
    for (int64_t r = 0; r < out.rows; ++r) {
      for (int64_t c = 0; c < out.cols; ++c) out.x.push_back(a.at(c, r));
    }
    return out;
  }

  const TestModel& model_;
  const int slots_, rank_;
  std::vector<AdaptedLinearShape> linears_;
  std::vector<float> table_;
  std::map<std::string, std::vector<Matrix>> a_, b_;  // by adapter, then slot
};

}  // namespace refit::test
