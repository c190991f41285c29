// Models of noise on GPU 0, and steps of them, for benchmarks of the forward pass.
#pragma once
#include <cuda_runtime_api.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "bench_gpu/timing.h"
#include "core/model.h"
#include "core/step.h"
#include "cuda/exchange/exchange.h"
#include "cuda/forward/forward.h"
#include "cuda/weights/scramble.h"

namespace refit::bench {

constexpr int kPageSize = 16;
constexpr int kTokenIds = 150000;  // less than the vocabulary of each shape

struct ModelShape {
  const char* name;
  const char* title;
  int layers, hidden, heads, kv_heads;
  int64_t inter;  // of the MLP, or of one expert
  QkNorm qk_norm = QkNorm::kHead;
  bool qkv_bias = false, tied_head = false;
  int experts = 0, experts_per_token = 0;
};

constexpr ModelShape kQwen3_8b{"8b", "Qwen3-8B", 36, 4096, 32, 8, 12288};
constexpr ModelShape kQwen3_30b{"30b", "Qwen3-30B-A3B", 48, 2048, 32, 4, 768, QkNorm::kHead, false, false, 128, 8};
constexpr ModelShape kQwen25_1_5b{"1.5b", "Qwen2.5-1.5B", 28, 1536, 12, 2, 8960, QkNorm::kNone, true, true};

// The recipe and the parameters of the first `layers` layers; the caller adds the limits of a step.
inline CoreConfig model_config(const ModelShape& shape, int layers) {
  CoreConfig c;
  ModelRecipe& m = c.recipe;
  m.hidden = shape.hidden, m.layers = layers, m.heads = shape.heads, m.kv_heads = shape.kv_heads;
  m.head_dim = 128, m.vocab = 151936;
  m.qk_norm = shape.qk_norm, m.qkv_bias = shape.qkv_bias, m.tied_head = shape.tied_head;
  m.experts = shape.experts, m.experts_per_token = shape.experts_per_token, m.norm_topk_prob = shape.experts > 0;
  for (int i = 0; i < m.head_dim / 2; ++i) m.rope_inv_freq.push_back(std::pow(1e6, -2.0 * i / m.head_dim));
  m.sparse_layers.assign(static_cast<size_t>(layers), shape.experts > 0);
  const int64_t h = m.hidden, q = int64_t{m.heads} * m.head_dim, qkv = q + 2 * int64_t{m.kv_heads} * m.head_dim;
  const int64_t inter = shape.inter, e = shape.experts;
  c.params = {{"embed", m.vocab, h}, {"norm", h, 1}};
  if (!m.tied_head) c.params.push_back({"lm_head", m.vocab, h});
  for (int layer = 0; layer < layers; ++layer) {
    const std::string p = "layers." + std::to_string(layer) + ".";
    c.params.push_back({p + "ln1", h, 1});
    c.params.push_back({p + "qkv", qkv, h});
    if (m.qkv_bias) c.params.push_back({p + "qkv_bias", qkv, 1});
    if (m.qk_norm == QkNorm::kHead) {
      c.params.push_back({p + "q_norm", m.head_dim, 1});
      c.params.push_back({p + "k_norm", m.head_dim, 1});
    }
    c.params.push_back({p + "o", h, q});
    c.params.push_back({p + "ln2", h, 1});
    if (e > 0) {
      c.params.push_back({p + "router", e, h});
      c.params.push_back({p + "w13", e * 2 * inter, h});
      c.params.push_back({p + "w2", e * h, inter});
    } else {
      c.params.push_back({p + "gate_up", 2 * inter, h});
      c.params.push_back({p + "down", h, inter});
    }
  }
  c.page_size = kPageSize;
  return c;
}

// Slots for adapters of all linears of a model without experts. inter: of its MLP.
inline void add_adapters(CoreConfig& c, int64_t inter, int slots, int rank) {
  const ModelRecipe& m = c.recipe;
  const int64_t s = slots, r = rank, h = m.hidden, q = int64_t{m.heads} * m.head_dim;
  const int64_t qkv = q + 2 * int64_t{m.kv_heads} * m.head_dim;
  c.adapter_slots = slots, c.adapter_rank = rank;
  c.params.push_back({"adapters.table", s * (7 * m.layers + 2), 2, DType::kFloat32});
  for (int layer = 0; layer < m.layers; ++layer) {
    const std::string p = "adapters.layers." + std::to_string(layer) + ".";
    c.params.push_back({p + "qkv_a", s * 3 * r, h});
    c.params.push_back({p + "qkv_b", s * qkv, r});
    c.params.push_back({p + "o_a", s * r, q});
    c.params.push_back({p + "o_b", s * h, r});
    c.params.push_back({p + "gate_up_a", s * 2 * r, h});
    c.params.push_back({p + "gate_up_b", s * 2 * inter, r});
    c.params.push_back({p + "down_a", s * r, inter});
    c.params.push_back({p + "down_b", s * h, r});
  }
}

constexpr int pages_of(int tokens) { return (tokens + kPageSize - 1) / kPageSize; }

// Sequences of `each` new tokens behind `before` tokens; one row each. adapters: how many; 0: the base model.
struct Step {
  Step(int sequences, int each, int before, int adapters = 0, float temperature = 0) {
    const int pages_of_one = pages_of(before + each);
    for (int s = 0; s < sequences; ++s) {
      for (int i = 0; i < each; ++i) tokens.push_back((s * 7919 + i * 31) % kTokenIds);
      seq_offsets.push_back(static_cast<int32_t>(tokens.size()));
      start_pos.push_back(before);
      for (int i = 0; i < pages_of_one; ++i) pages.push_back(s * pages_of_one + i);
      page_offsets.push_back(static_cast<int32_t>(pages.size()));
      row_ints.insert(row_ints.end(), {seq_offsets.back() - 1, -1, 0, 0, 0, 0, -1});
      row_floats.insert(row_floats.end(), {temperature, 1, 0, 0, 0, 1});
      row_seeds.push_back(static_cast<uint64_t>(s));
      zeros.push_back(0);
      if (adapters > 0) slots.push_back(s * adapters / sequences);
    }
    zeros.push_back(0);
  }
  void run(cuda::Forward& forward) {
    StepBatch batch;
    batch.tokens = tokens, batch.seq_offsets = seq_offsets, batch.start_pos = start_pos;
    batch.page_offsets = page_offsets, batch.pages = pages;
    batch.row_ints = row_ints, batch.row_floats = row_floats, batch.row_seeds = row_seeds;
    batch.history_offsets = zeros, batch.bias_offsets = zeros, batch.id_offsets = zeros;
    batch.adapters = slots;
    forward.step(batch, result);
  }

  std::vector<int32_t> tokens, seq_offsets{0}, start_pos, page_offsets{0}, pages, row_ints, zeros, slots;
  std::vector<float> row_floats;
  std::vector<uint64_t> row_seeds;
  StepResult result;
};

// The engine's memory: weights and cache of noise.
class Engine {
 public:
  explicit Engine(CoreConfig config) : config_(std::move(config)) {
    const cuda::ForwardSizes sizes = cuda::forward_sizes(config_);
    memory_.kv = noise(static_cast<int64_t>(sizes.kv / 2));
    memory_.scratch = add(sizes.scratch), memory_.peer = add(sizes.peer);
    memory_.params.emplace_back();
    for (const Param& p : config_.params)
      memory_.params[0].push_back(reinterpret_cast<const cuda::Element*>(values(p)));
    cuda::check(cudaDeviceSynchronize(), "weights");
    ranks_.push_back(std::make_unique<cuda::Rank>(0, 0));
    forward_ = make(config_);
  }
  cuda::Forward& forward() { return *forward_; }
  const CoreConfig& config() const { return config_; }

  // The experts of the step's tokens: StepResult::experts.
  std::vector<uint16_t> experts(Step& step) {
    CoreConfig recording = config_;
    recording.record_experts = true;
    step.run(*make(recording));
    return std::move(step.result.experts);
  }

 private:
  std::unique_ptr<cuda::Forward> make(const CoreConfig& config) {
    return std::make_unique<cuda::Forward>(config, ranks_, std::vector<cuda::ForwardMemory>{memory_});
  }
  uint8_t* add(size_t bytes) {
    regions_.push_back(std::make_unique<GpuMemory>(0, bytes));
    return regions_.back()->data();
  }
  uint8_t* noise(int64_t count) {
    uint8_t* const to = add(static_cast<size_t>(count) * 2);
    cuda::scramble(reinterpret_cast<cuda::Element*>(to), count, 1, regions_.size(), nullptr);
    return to;
  }
  template <class T>
  uint8_t* upload(const std::vector<T>& values) {
    uint8_t* const to = add(values.size() * sizeof(T));
    cuda::check(cudaMemcpy(to, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "upload");
    return to;
  }
  uint8_t* values(const Param& p) {
    if (p.dtype == DType::kFloat32) return table(p);
    // Attention averages many tokens, so its output is almost the same for all later ones. Small norms keep it below
    // the noise of the embedding and of the MLP: tokens stay different, and their experts are spread.
    if (p.name.ends_with(".ln1")) return constant(p.rows, 0x1p-10f);
    if (p.name.ends_with(".ln2")) return constant(p.rows, 0x1p-4f);
    return noise(p.rows * p.cols);
  }
  uint8_t* constant(int64_t count, float value) {
    return upload(std::vector<uint16_t>(static_cast<size_t>(count), float_to_bf16(value)));
  }
  // The slots of adapters: scale and rank of each linear.
  uint8_t* table(const Param& p) {
    std::vector<float> entries;
    for (int64_t i = 0; i < p.rows; ++i) {
      entries.insert(entries.end(), {1e-3f, static_cast<float>(config_.adapter_rank)});
    }
    return upload(entries);
  }

  const CoreConfig config_;
  std::vector<std::unique_ptr<GpuMemory>> regions_;
  cuda::ForwardMemory memory_;
  std::vector<std::unique_ptr<cuda::Rank>> ranks_;
  std::unique_ptr<cuda::Forward> forward_;
};

}  // namespace refit::bench
