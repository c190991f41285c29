// Tiny random models: their weights, the shards that the ranks of a device hold, and a forward pass in double precision
// that shares no code with the engine's.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "core/device.h"

namespace refit::test {

struct Variant {
  const char* name;
  int hidden, layers, heads, kv_heads, head_dim, inter, vocab;
  bool qkv_bias, o_bias, qk_norm, tied;
  int experts = 0, experts_per_token = 0, expert_inter = 0;
  bool norm_topk = true;
  std::vector<uint8_t> sparse = {};
  double rope_scale = 1.0;
  // OLMo 2: norms after attention and MLP, norms of the whole projections (qk_norm is true), and one rounding.
  bool olmo2 = false;
  Activation activation = Activation::kSilu;
};

struct Matrix {
  int64_t rows = 0, cols = 0;
  std::vector<float> x;
  float at(int64_t r, int64_t c) const { return x[r * cols + c]; }
};

struct TestModel {
  Variant v;
  DType dtype;
  std::map<std::string, Matrix> weights;  // unsharded; fused as core/model.h has them for one rank
  ModelRecipe recipe;
  bool record = true;          // CoreConfig::record_experts
  bool deterministic = false;  // CoreConfig::deterministic

  TestModel(const Variant& variant, DType type, uint32_t seed) : v(variant), dtype(type) {
    std::mt19937 rng(seed);
    const auto make = [&](const std::string& name, int64_t rows, int64_t cols, double mean, double sd) {
      std::normal_distribution<double> normal(mean, sd);
      Matrix m{rows, cols, std::vector<float>(rows * cols)};
      for (float& f : m.x) {
        f = static_cast<float>(normal(rng));
        f = round_to(dtype, f);
      }
      weights[name] = std::move(m);
    };
    const int64_t h = v.hidden, d = v.head_dim, qkv = (v.heads + 2 * v.kv_heads) * d;
    make("embed", v.vocab, h, 0, 1);
    make("norm", h, 1, 1, 0.2);
    if (!v.tied) make("lm_head", v.vocab, h, 0, 0.3);
    for (int l = 0; l < v.layers; ++l) {
      const std::string p = "layers." + std::to_string(l) + ".";
      make(p + "ln1", h, 1, 1, 0.2);
      make(p + "qkv", qkv, h, 0, 0.2);
      if (v.qkv_bias) make(p + "qkv_bias", qkv, 1, 0, 0.3);
      if (v.qk_norm) {
        make(p + "q_norm", v.olmo2 ? v.heads * d : d, 1, 1, 0.2);
        make(p + "k_norm", v.olmo2 ? v.kv_heads * d : d, 1, 1, 0.2);
      }
      make(p + "o", h, v.heads * d, 0, 0.15);
      if (v.o_bias) make(p + "o_bias", h, 1, 0, 0.3);
      make(p + "ln2", h, 1, 1, 0.2);
      if (sparse(l)) {
        make(p + "router", v.experts, h, 0, 0.3);
        make(p + "w13", int64_t{v.experts} * 2 * v.expert_inter, h, 0, 0.15);
        make(p + "w2", v.experts * h, v.expert_inter, 0, 0.15);
      } else {
        make(p + "gate_up", 2 * v.inter, h, 0, 0.15);
        make(p + "down", h, v.inter, 0, 0.15);
      }
    }
    recipe.hidden = v.hidden, recipe.layers = v.layers, recipe.heads = v.heads, recipe.kv_heads = v.kv_heads,
    recipe.head_dim = v.head_dim;
    recipe.vocab = v.vocab, recipe.rms_eps = 1e-5f, recipe.rope_scale = v.rope_scale;
    for (int i = 0; i < v.head_dim / 2; ++i) recipe.rope_inv_freq.push_back(std::pow(500.0, -2.0 * i / v.head_dim));
    recipe.sparse_layers.assign(v.layers, 0);
    for (int l = 0; l < v.layers; ++l) recipe.sparse_layers[l] = sparse(l);
    recipe.norm_placement = v.olmo2 ? NormPlacement::kPost : NormPlacement::kPre;
    recipe.qk_norm = !v.qk_norm ? QkNorm::kNone : v.olmo2 ? QkNorm::kProjection : QkNorm::kHead;
    recipe.activation = v.activation;
    recipe.round_once = v.olmo2, recipe.qkv_bias = v.qkv_bias, recipe.o_bias = v.o_bias, recipe.tied_head = v.tied;
    recipe.experts = v.experts, recipe.experts_per_token = v.experts_per_token, recipe.norm_topk_prob = v.norm_topk;
  }

  bool gathers(int ranks) const { return deterministic && ranks > 1; }
  bool sparse(int layer) const { return !v.sparse.empty() && v.sparse[layer] != 0; }

  // The shard of a weight that rank `rank` of `ranks` has.
  Matrix shard(const std::string& full, int rank, int ranks) const {
    const Matrix& w = weights.at(full);
    const std::string name = full.substr(full.rfind('.') + 1);
    const auto rows = [&](std::vector<std::pair<int64_t, int64_t>> ranges) {  // (first, count)
      Matrix m{0, w.cols, {}};
      for (auto [first, count] : ranges) {
        for (int64_t r = first; r < first + count; ++r) {
          for (int64_t c = 0; c < w.cols; ++c) m.x.push_back(r < w.rows ? w.at(r, c) : 0.0f);
        }
        m.rows += count;
      }
      return m;
    };
    const auto cols = [&](int64_t count) {
      Matrix m{w.rows, count, {}};
      for (int64_t r = 0; r < w.rows; ++r) {
        for (int64_t c = 0; c < count; ++c) m.x.push_back(w.at(r, rank * count + c));
      }
      return m;
    };
    const int64_t d = v.head_dim, q = v.heads / ranks * d, kv_heads = std::max(1, v.kv_heads / ranks),
                  kv = kv_heads * d;
    if (name == "embed" || name == "lm_head") {
      const int64_t n = (v.vocab + ranks - 1) / ranks;
      return rows({{rank * n, n}});
    }
    if (name == "qkv" || name == "qkv_bias") {
      const int64_t first = int64_t{rank} * v.kv_heads / ranks * d;
      return rows({{rank * q, q}, {v.heads * d + first, kv}, {(v.heads + v.kv_heads) * d + first, kv}});
    }
    if (name == "o" || name == "down" || name == "w2") {
      if (!gathers(ranks)) return cols(w.cols / ranks);
      const int64_t n = v.hidden / ranks;
      std::vector<std::pair<int64_t, int64_t>> ranges;
      for (int64_t first = 0; first < w.rows; first += v.hidden) ranges.push_back({first + rank * n, n});
      return rows(ranges);
    }
    if (name == "gate_up")
      return rows({{rank * (v.inter / ranks), v.inter / ranks}, {v.inter + rank * (v.inter / ranks), v.inter / ranks}});
    if (name == "w13") {
      const int64_t n = v.expert_inter / ranks;
      std::vector<std::pair<int64_t, int64_t>> ranges;
      for (int64_t e = 0; e < v.experts; ++e) {
        ranges.push_back({e * 2 * v.expert_inter + rank * n, n});
        ranges.push_back({(e * 2 + 1) * v.expert_inter + rank * n, n});
      }
      return rows(ranges);
    }
    return w;
  }

  CoreConfig config(int ranks, int threads, const std::string& isa, int pages, int page_size) const {
    CoreConfig c;
    c.ranks = ranks, c.threads = threads, c.isa = isa, c.dtype = dtype, c.recipe = recipe, c.pages = pages,
    c.page_size = page_size, c.record_experts = record, c.deterministic = deterministic;
    for (const auto& [name, w] : weights) {
      const Matrix m = shard(name, 0, ranks);
      c.params.push_back({name, m.rows, m.cols, dtype});
    }
    return c;
  }

  std::unique_ptr<Device> device(int ranks, int threads, const std::string& isa, int pages, int page_size) const {
    const CoreConfig c = config(ranks, threads, isa, pages, page_size);
    auto device = make_cpu_device(c);
    for (int rank = 0; rank < ranks; ++rank) {
      for (size_t p = 0; p < c.params.size(); ++p) {
        const Matrix m = shard(c.params[p].name, rank, ranks);
        // The weights are written directly into memory: writes have their own tests.
        void* to = const_cast<void*>(device->address(rank, static_cast<int>(p)));
        for (size_t i = 0; i < m.x.size(); ++i) {
          if (dtype != DType::kFloat32) {
            static_cast<uint16_t*>(to)[i] = static_cast<uint16_t>(from_float(dtype, m.x[i]));
          } else {
            static_cast<float*>(to)[i] = m.x[i];
          }
        }
      }
    }
    return device;
  }

  using Vec = std::vector<double>;

  Vec linear(const Matrix& w, const Vec& x, int64_t first = 0, int64_t count = -1) const {
    if (count < 0) count = w.rows;
    Vec y(count, 0.0);
    for (int64_t r = 0; r < count; ++r) {
      double sum = 0;
      for (int64_t c = 0; c < w.cols; ++c) sum += static_cast<double>(w.at(first + r, c)) * x[c];
      y[r] = sum;
    }
    return y;
  }

  Vec rms(const Matrix& w, const double* x, int64_t n) const {
    double ss = 0;
    for (int64_t i = 0; i < n; ++i) ss += x[i] * x[i];
    Vec y(n);
    for (int64_t i = 0; i < n; ++i) y[i] = x[i] / std::sqrt(ss / n + recipe.rms_eps) * w.x[i];
    return y;
  }

  void rope(double* x, int position) const {
    const int half = v.head_dim / 2;
    for (int i = 0; i < half; ++i) {
      const double a = position * recipe.rope_inv_freq[i], c = std::cos(a) * recipe.rope_scale,
                   s = std::sin(a) * recipe.rope_scale;
      const double lo = x[i], hi = x[i + half];
      x[i] = lo * c - hi * s;
      x[i + half] = hi * c + lo * s;
    }
  }

  double activated(double g) const {
    if (v.activation == Activation::kSilu) return g / (1 + std::exp(-g));
    return g / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (g + 0.044715 * g * g * g)));
  }

  Vec gated(const Matrix& w13, const Matrix& w2, int64_t r13, int64_t r2, int64_t inter, const Vec& x) const {
    const Vec gu = linear(w13, x, r13, 2 * inter);
    Vec act(inter);
    for (int64_t i = 0; i < inter; ++i) act[i] = activated(gu[i]) * gu[inter + i];
    return linear(w2, act, r2, v.hidden);
  }

  // The experts that were chosen, best first, are appended to `chosen`.
  Vec mlp(int layer, const std::string& p, const Vec& x, std::vector<int>& chosen) const {
    if (!sparse(layer)) return gated(weights.at(p + "gate_up"), weights.at(p + "down"), 0, 0, v.inter, x);
    Vec logits = linear(weights.at(p + "router"), x);
    double sum = 0;
    for (double& z : logits) sum += z = std::exp(z);
    std::vector<int> order(v.experts);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return logits[a] > logits[b]; });
    double total = 0;
    for (int i = 0; i < v.experts_per_token; ++i) total += logits[order[i]];
    Vec y(v.hidden, 0.0);
    for (int i = 0; i < v.experts_per_token; ++i) {
      const int e = order[i];
      chosen.push_back(e);
      const Vec out = gated(weights.at(p + "w13"), weights.at(p + "w2"), int64_t{e} * 2 * v.expert_inter,
                            int64_t{e} * v.hidden, v.expert_inter, x);
      for (int j = 0; j < v.hidden; ++j) y[j] += out[j] * logits[e] / (v.norm_topk ? total : sum);
    }
    return y;
  }

  // Logits of every position of one sequence: [tokens][vocab]. `routed`: the experts of each token, [tokens][sparse
  // layers * experts per token].
  std::vector<Vec> logits(const std::vector<int32_t>& tokens, std::vector<std::vector<int>>* routed = nullptr) const {
    std::vector<std::vector<int>> chosen(tokens.size());
    const int n = static_cast<int>(tokens.size()), d = v.head_dim, group = v.heads / v.kv_heads;
    std::vector<Vec> h(n, Vec(v.hidden));
    for (int t = 0; t < n; ++t) {
      for (int i = 0; i < v.hidden; ++i) h[t][i] = weights.at("embed").at(tokens[t], i);
    }
    for (int l = 0; l < v.layers; ++l) {
      const std::string p = "layers." + std::to_string(l) + ".";
      std::vector<Vec> qkv(n);
      for (int t = 0; t < n; ++t) {
        qkv[t] = linear(weights.at(p + "qkv"), v.olmo2 ? h[t] : rms(weights.at(p + "ln1"), h[t].data(), v.hidden));
        if (v.qkv_bias) {
          for (size_t i = 0; i < qkv[t].size(); ++i) qkv[t][i] += weights.at(p + "qkv_bias").x[i];
        }
        for (const bool is_q : {true, false}) {
          if (!v.olmo2) break;
          double* x = qkv[t].data() + (is_q ? 0 : v.heads * d);
          const Vec y = rms(weights.at(p + (is_q ? "q_norm" : "k_norm")), x, (is_q ? v.heads : v.kv_heads) * d);
          std::copy(y.begin(), y.end(), x);
        }
        for (int head = 0; head < v.heads + v.kv_heads; ++head) {
          double* x = qkv[t].data() + head * d;
          if (v.qk_norm && !v.olmo2) {
            const Vec y = rms(weights.at(p + (head < v.heads ? "q_norm" : "k_norm")), x, d);
            std::copy(y.begin(), y.end(), x);
          }
          rope(x, t);
        }
      }
      for (int t = 0; t < n; ++t) {
        Vec mixed(v.heads * d, 0.0);
        for (int head = 0; head < v.heads; ++head) {
          const double* q = qkv[t].data() + head * d;
          const int k_at = (v.heads + head / group) * d, v_at = k_at + v.kv_heads * d;
          Vec s(t + 1);
          double max = -1e300, sum = 0;
          for (int j = 0; j <= t; ++j) {
            s[j] = std::inner_product(q, q + d, qkv[j].data() + k_at, 0.0) / std::sqrt(static_cast<double>(d));
            max = std::max(max, s[j]);
          }
          for (double& x : s) sum += x = std::exp(x - max);
          for (int j = 0; j <= t; ++j) {
            for (int i = 0; i < d; ++i) mixed[head * d + i] += s[j] / sum * qkv[j][v_at + i];
          }
        }
        Vec o = linear(weights.at(p + "o"), mixed);
        for (int i = 0; i < v.hidden; ++i) o[i] += v.o_bias ? weights.at(p + "o_bias").x[i] : 0.0f;
        if (v.olmo2) o = rms(weights.at(p + "ln1"), o.data(), v.hidden);
        for (int i = 0; i < v.hidden; ++i) h[t][i] += o[i];
        Vec m = mlp(l, p, v.olmo2 ? h[t] : rms(weights.at(p + "ln2"), h[t].data(), v.hidden), chosen[t]);
        if (v.olmo2) m = rms(weights.at(p + "ln2"), m.data(), v.hidden);
        for (int i = 0; i < v.hidden; ++i) h[t][i] += m[i];
      }
    }
    std::vector<Vec> out(n);
    for (int t = 0; t < n; ++t) {
      out[t] = linear(weights.at(v.tied ? "embed" : "lm_head"), rms(weights.at("norm"), h[t].data(), v.hidden));
    }
    if (routed != nullptr) *routed = std::move(chosen);
    return out;
  }
};

// A batch under construction, with the storage behind the views of StepBatch.
struct BatchBuilder {
  std::vector<int32_t> tokens, seq_offsets{0}, start_pos, page_offsets{0}, pages, row_ints, history_offsets{0}, history,
      bias_offsets{0}, bias_tokens, id_offsets{0}, ids;
  std::vector<float> row_floats, bias_values;
  std::vector<uint32_t> masks;
  std::vector<int32_t> adapters;  // of each sequence; empty: none has one
  int mask_count = 0;
  std::vector<uint64_t> row_seeds;

  // Returns the index of the first token.
  int32_t sequence(const std::vector<int32_t>& new_tokens, int32_t start, const std::vector<int32_t>& page_list) {
    const int32_t first = static_cast<int32_t>(tokens.size());
    tokens.insert(tokens.end(), new_tokens.begin(), new_tokens.end());
    seq_offsets.push_back(static_cast<int32_t>(tokens.size()));
    start_pos.push_back(start);
    pages.insert(pages.end(), page_list.begin(), page_list.end());
    page_offsets.push_back(static_cast<int32_t>(pages.size()));
    return first;
  }
  struct Row {
    int32_t token = 0, target = -1, top_k = 0, top = 0, flags = kRowWantLogprob, history_prompt = 0;
    float temperature = 1, top_p = 1, min_p = 0, frequency = 0, presence = 0, repetition = 1;
    uint64_t seed = 0;
    std::vector<int32_t> history = {};
    std::vector<std::pair<int32_t, float>> bias = {};
    std::vector<int32_t> ids = {};
    std::vector<uint32_t> mask = {};  // empty: all tokens are allowed
  };
  void row(const Row& r) {
    row_ints.insert(row_ints.end(),
                    {r.token, r.target, r.top_k, r.top, r.flags, r.history_prompt, r.mask.empty() ? -1 : mask_count++});
    masks.insert(masks.end(), r.mask.begin(), r.mask.end());
    row_floats.insert(row_floats.end(), {r.temperature, r.top_p, r.min_p, r.frequency, r.presence, r.repetition});
    row_seeds.push_back(r.seed);
    history.insert(history.end(), r.history.begin(), r.history.end());
    history_offsets.push_back(static_cast<int32_t>(history.size()));
    for (auto [token, value] : r.bias) bias_tokens.push_back(token), bias_values.push_back(value);
    bias_offsets.push_back(static_cast<int32_t>(bias_tokens.size()));
    ids.insert(ids.end(), r.ids.begin(), r.ids.end());
    id_offsets.push_back(static_cast<int32_t>(ids.size()));
  }
  StepBatch view() const {
    return {tokens,    seq_offsets,     start_pos, page_offsets, pages,       row_ints,    row_floats,
            row_seeds, history_offsets, history,   bias_offsets, bias_tokens, bias_values, id_offsets,
            ids,       masks,           adapters};
  }
  StepResult run(Device& device) const {
    StepResult result;
    device.step(view(), result);
    return result;
  }
};

}  // namespace refit::test
