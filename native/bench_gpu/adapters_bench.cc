// Steps of a Qwen3-8B shape with LoRA adapters beside the same steps without: decode with a context of 1,024 tokens,
// and a prefill.   adapters_bench [--layers N] [--rank R] [--turns N] [--only TOKENS]
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "bench_gpu/timing.h"
#include "core/model.h"
#include "core/step.h"
#include "cuda/exchange/exchange.h"
#include "cuda/forward/forward.h"
#include "cuda/weights/scramble.h"

using namespace refit;
using namespace refit::bench;
using cuda::check;

namespace {

constexpr int kSlots = 32, kPageSize = 16, kContext = 1024, kPrefill = 4096, kMostSequences = 256;

struct Options {
  int layers = 36, rank = 32, turns = 15, only = 0;
};

void add_adapters(CoreConfig& c, const Options& o, int64_t inter) {
  const ModelRecipe& m = c.recipe;
  const int64_t s = kSlots, r = o.rank, h = m.hidden, q = int64_t{m.heads} * m.head_dim;
  const int64_t qkv = q + 2 * int64_t{m.kv_heads} * m.head_dim;
  c.adapter_slots = kSlots, c.adapter_rank = o.rank;
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

CoreConfig config(const Options& o) {
  CoreConfig c;
  ModelRecipe& m = c.recipe;
  m.hidden = 4096, m.layers = o.layers, m.heads = 32, m.kv_heads = 8, m.head_dim = 128, m.vocab = 151936;
  m.qk_norm = QkNorm::kHead;
  for (int i = 0; i < m.head_dim / 2; ++i) m.rope_inv_freq.push_back(std::pow(1e6, -2.0 * i / m.head_dim));
  m.sparse_layers.assign(static_cast<size_t>(m.layers), 0);
  const int64_t h = m.hidden, q = int64_t{m.heads} * m.head_dim, qkv = q + 2 * int64_t{m.kv_heads} * m.head_dim;
  const int64_t inter = 12288;
  c.params = {{"embed", m.vocab, h}, {"norm", h, 1}, {"lm_head", m.vocab, h}};
  for (int layer = 0; layer < m.layers; ++layer) {
    const std::string p = "layers." + std::to_string(layer) + ".";
    c.params.push_back({p + "ln1", h, 1});
    c.params.push_back({p + "qkv", qkv, h});
    c.params.push_back({p + "q_norm", m.head_dim, 1});
    c.params.push_back({p + "k_norm", m.head_dim, 1});
    c.params.push_back({p + "o", h, q});
    c.params.push_back({p + "ln2", h, 1});
    c.params.push_back({p + "gate_up", 2 * inter, h});
    c.params.push_back({p + "down", h, inter});
  }
  add_adapters(c, o, inter);
  c.page_size = kPageSize;
  c.pages = kMostSequences * (kContext + kPageSize) / kPageSize;
  c.max_step_tokens = kPrefill, c.max_step_sequences = kMostSequences, c.max_context = kContext + kPageSize;
  return c;
}

// The engine's memory: weights and cache of noise.
class Engine {
 public:
  explicit Engine(const Options& o) : config_(config(o)) {
    const cuda::ForwardSizes sizes = cuda::forward_sizes(config_);
    cuda::ForwardMemory memory;
    memory.kv = noise(static_cast<int64_t>(sizes.kv / 2));
    memory.scratch = add(sizes.scratch), memory.peer = add(sizes.peer);
    for (const Param& p : config_.params) {
      uint8_t* const to = p.dtype == DType::kFloat32 ? table(p, o.rank) : noise(p.rows * p.cols);
      memory.params.push_back(reinterpret_cast<const cuda::bf16*>(to));
    }
    check(cudaDeviceSynchronize(), "weights");
    ranks_.push_back(std::make_unique<cuda::Rank>(0, 0));
    forward_ = std::make_unique<cuda::Forward>(config_, ranks_, std::vector<cuda::ForwardMemory>{memory});
  }
  cuda::Forward& forward() { return *forward_; }

 private:
  uint8_t* add(size_t bytes) {
    memory_.push_back(std::make_unique<GpuMemory>(0, bytes));
    return memory_.back()->data();
  }
  uint8_t* noise(int64_t count) {
    uint8_t* const to = add(static_cast<size_t>(count) * 2);
    cuda::scramble(reinterpret_cast<cuda::bf16*>(to), count, 1, memory_.size(), nullptr);
    return to;
  }
  uint8_t* table(const Param& p, int rank) {
    std::vector<float> entries;
    for (int64_t i = 0; i < p.rows; ++i) entries.insert(entries.end(), {1e-3f, static_cast<float>(rank)});
    uint8_t* const to = add(entries.size() * sizeof(float));
    check(cudaMemcpy(to, entries.data(), entries.size() * sizeof(float), cudaMemcpyHostToDevice), "table");
    return to;
  }

  const CoreConfig config_;
  std::vector<std::unique_ptr<GpuMemory>> memory_;
  std::vector<std::unique_ptr<cuda::Rank>> ranks_;
  std::unique_ptr<cuda::Forward> forward_;
};

// Sequences of `each` new tokens behind `before` tokens; one row each. adapters: how many; 0: the base model.
struct Step {
  Step(int sequences, int each, int before, int adapters) {
    const int pages_of_one = (before + each + kPageSize - 1) / kPageSize;
    for (int s = 0; s < sequences; ++s) {
      for (int i = 0; i < each; ++i) tokens.push_back((s * 7919 + i * 31) % 150000);
      seq_offsets.push_back(static_cast<int32_t>(tokens.size()));
      start_pos.push_back(before);
      for (int i = 0; i < pages_of_one; ++i) pages.push_back(s * pages_of_one + i);
      page_offsets.push_back(static_cast<int32_t>(pages.size()));
      row_ints.insert(row_ints.end(), {seq_offsets.back() - 1, -1, 0, 0, 0, 0, -1});
      row_floats.insert(row_floats.end(), {0, 1, 0, 0, 0, 1});
      row_seeds.push_back(0);
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

void compare(cuda::Forward& forward, const Options& o, const std::string& name, int sequences, int each, int before) {
  std::vector<std::unique_ptr<Step>> steps;
  std::vector<Contestant> all;
  for (const int adapters : {0, 1, 8, 32}) {
    if (adapters > sequences) continue;
    steps.push_back(std::make_unique<Step>(sequences, each, before, adapters));
    all.push_back({adapters == 0 ? "base" : std::to_string(adapters) + (adapters == 1 ? " adapter" : " adapters"),
                   [&forward, step = steps.back().get()](cudaStream_t) { step->run(forward); },
                   {}});
  }
  take_turns_by_clock(all, o.turns);
  for (const Contestant& one : all) {
    const auto [least, most] = std::minmax_element(one.ms.begin(), one.ms.end());
    std::printf("| %s | %s | %.3f ms (%.3f to %.3f) | %.1f %% |\n", name.c_str(), one.name.c_str(), one.median(),
                *least, *most, 100 * all[0].median() / one.median());
  }
  std::fflush(stdout);
}

Options parse(int argc, char** argv) {
  Options o;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--layers") == 0) o.layers = std::atoi(argv[i + 1]);
    if (std::strcmp(argv[i], "--rank") == 0) o.rank = std::atoi(argv[i + 1]);
    if (std::strcmp(argv[i], "--turns") == 0) o.turns = std::atoi(argv[i + 1]);
    if (std::strcmp(argv[i], "--only") == 0) o.only = std::atoi(argv[i + 1]);
  }
  return o;
}

}  // namespace

int main(int argc, char** argv) {
  const Options o = parse(argc, argv);
  try {
    print_gpu(0);
    Engine engine(o);
    std::printf("\nQwen3-8B's shape, %d layers, adapters of rank %d on all linears; median of %d turns\n\n", o.layers,
                o.rank, o.turns);
    std::printf("| step | adapters | time | of base |\n| --- | --- | --- | --- |\n");
    for (const int tokens : {1, 16, 64, 256}) {
      if (o.only != 0 && o.only != tokens) continue;
      compare(engine.forward(), o, "decode, " + std::to_string(tokens) + " running", tokens, 1, kContext);
    }
    if (o.only == 0 || o.only == kPrefill) {
      compare(engine.forward(), o, "prefill, 32 prompts of " + std::to_string(kPrefill / 32), 32, kPrefill / 32, 0);
    }
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "adapters_bench: %s\n", error.what());
    return 1;
  }
}
