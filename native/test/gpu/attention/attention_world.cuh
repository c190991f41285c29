// Sequences with a paged cache for the tests of attention. Every key depends only on its sequence and position, so the
// same token can be computed in many ways, and all ways compared.
#pragma once
#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "core/step.h"
#include "cuda/attention/attention.h"
#include "test/gpu/matrix_common.cuh"

namespace refit::test {

struct AttentionHeads {
  int heads, kv_heads, head_dim, page_size;
  int group() const { return heads / kv_heads; }
};

// Some new tokens of a sequence in a step.
struct Piece {
  int sequence, start, count;
  int end() const { return start + count; }
};

inline float value_of(Element x) { return to_float(x); }

class AttentionWorld {
 public:
  // lengths: tokens of each sequence. Sequence s > 0 shares the first `shared[s]` pages with sequence parents[s] < s,
  // or with sequence 0 if there are no parents.
  AttentionWorld(const AttentionHeads& shape, std::vector<int> lengths, std::vector<int> shared, float q_scale,
                 uint64_t seed, std::vector<int> parents = {})
      : shape(shape),
        lengths(std::move(lengths)),
        q_scale_(q_scale),
        seed_(seed),
        shared_(std::move(shared)),
        parents_(std::move(parents)) {
    if (parents_.empty()) parents_.assign(this->lengths.size(), 0);
    std::mt19937_64 rng(seed);
    int count = 0;
    for (size_t s = 0; s < this->lengths.size(); ++s) count += pages_of(this->lengths[s]);
    // More pages than are used, in random order.
    std::vector<int32_t> free(count + 3);
    std::iota(free.begin(), free.end(), 0);
    std::shuffle(free.begin(), free.end(), rng);
    page_count = static_cast<int>(free.size());
    for (size_t s = 0; s < this->lengths.size(); ++s) {
      std::vector<int32_t> table;
      for (int p = 0; p < pages_of(this->lengths[s]); ++p) {
        if (s > 0 && p < shared_[s]) {
          table.push_back(tables[parents_[s]][p]);
        } else {
          table.push_back(free.back());
          free.pop_back();
        }
      }
      tables.push_back(std::move(table));
      keys_.push_back(content(1, static_cast<int>(s), keys_));
      values_.push_back(content(2, static_cast<int>(s), values_));
    }
  }

  int pages_of(int tokens) const { return (tokens + shape.page_size - 1) / shape.page_size; }
  int64_t q_columns() const { return static_cast<int64_t>(shape.heads) * shape.head_dim; }

  // [head_dim]
  const Element* key(int s, int position, int head) const { return &keys_[s][row(position, head)]; }
  const Element* value(int s, int position, int head) const { return &values_[s][row(position, head)]; }
  Element query(int s, int position, int head, int d) const {
    return to_element(noise(index(3, s, position, head, d), seed_) * q_scale_);
  }

  const AttentionHeads shape;
  const std::vector<int> lengths;
  std::vector<std::vector<int32_t>> tables;
  int page_count = 0;

 private:
  size_t row(int position, int head) const {
    return (static_cast<size_t>(position) * shape.kv_heads + head) * shape.head_dim;
  }
  std::vector<Element> content(int what, int s, const std::vector<std::vector<Element>>& earlier) const {
    std::vector<Element> x(row(lengths[s], 0));
    // Shared pages contain the parent's keys.
    const int own = s == 0 ? 0 : std::min(lengths[s], shared_[s] * shape.page_size);
    if (own > 0) std::copy_n(earlier[parents_[s]].begin(), row(own, 0), x.begin());
    for (int position = own; position < lengths[s]; ++position) {
      for (int head = 0; head < shape.kv_heads; ++head) {
        for (int d = 0; d < shape.head_dim; ++d) {
          x[row(position, head) + d] = to_element(noise(index(what, s, position, head, d), seed_));
        }
      }
    }
    return x;
  }
  static uint64_t index(int what, int s, int position, int head, int d) {
    return (((static_cast<uint64_t>(what) * 1024 + s) * (1 << 20) + position) * 128 + head) * 256 + d;
  }

  float q_scale_;
  uint64_t seed_;
  std::vector<int> shared_, parents_;
  std::vector<std::vector<Element>> keys_, values_;  // of each sequence [length, kv_heads, head_dim]
};

// A step's arrays, kept where StepBatch can point at them.
struct StepArrays {
  std::vector<int32_t> tokens, seq_offsets{0}, start_pos, page_offsets{0}, pages;

  StepArrays(const AttentionWorld& world, const std::vector<Piece>& pieces) {
    for (const Piece& piece : pieces) {
      tokens.resize(tokens.size() + piece.count);
      seq_offsets.push_back(static_cast<int32_t>(tokens.size()));
      start_pos.push_back(piece.start);
      // A table may be longer than needed.
      const auto& table = world.tables[piece.sequence];
      pages.insert(pages.end(), table.begin(), table.end());
      page_offsets.push_back(static_cast<int32_t>(pages.size()));
    }
  }
  StepBatch batch() const {
    StepBatch b;
    b.tokens = tokens;
    b.seq_offsets = seq_offsets;
    b.start_pos = start_pos;
    b.page_offsets = page_offsets;
    b.pages = pages;
    return b;
  }
};

// The plan's arrays on the GPU.
class AttentionOnGpu {
 public:
  AttentionOnGpu(const std::vector<int32_t>& pages, const cuda::AttentionPlan& plan, int heads, int head_dim)
      : plan_(plan),
        items_(plan.items.size()),
        merges_(plan.merges.size()),
        prefixes_(plan.prefixes.size()),
        members_(plan.members.size()),
        pages_(pages.size()),
        parts_(static_cast<size_t>(plan.part_rows) * heads * (head_dim + 2)) {
    items_.put(plan.items);
    merges_.put(plan.merges);
    prefixes_.put(plan.prefixes);
    members_.put(plan.members);
    pages_.put(pages);
  }
  cuda::AttentionInput input() {
    return {items_.data(),    static_cast<int>(plan_.items.size()),
            merges_.data(),   static_cast<int>(plan_.merges.size()),
            pages_.data(),    parts_.data(),
            plan_.wide_items, plan_.wide,
            prefixes_.data(), static_cast<int>(plan_.prefixes.size()),
            members_.data()};
  }
  void check_guards(const std::string& what) { parts_.check_guards("parts", what); }

 private:
  const cuda::AttentionPlan& plan_;
  Buffer<cuda::AttentionItem> items_;
  Buffer<cuda::AttentionMerge> merges_;
  Buffer<cuda::AttentionPrefix> prefixes_;
  Buffer<cuda::AttentionMember> members_;
  Buffer<int32_t> pages_;
  Buffer<float> parts_;
};

// How a step is computed.
struct Way {
  cuda::AttentionSplit split = cuda::AttentionSplit::kAuto;
  bool share = false;     // keys that sequences share are always read once, else never
  bool know_wide = true;  // AttentionInput::wide_items is set
  size_t prefixes = 0;    // set: the prefixes of the plan
};

// Runs one step of these pieces: out [tokens, heads * head_dim]. Before it, slots of the cache that no piece may see,
// columns of k and v in qkv, and the output are NaN.
inline std::vector<Element> run_attention(const AttentionWorld& world, const std::vector<Piece>& pieces, Way& way,
                                          cuda::WideKernel wide, const std::string& what) {
  const AttentionHeads& h = world.shape;
  const StepArrays step(world, pieces);
  const cuda::AttentionPlan plan =
      cuda::plan_attention(step.batch(), h.group(), h.kv_heads, way.split, wide, {way.share ? h.page_size : 0, true});
  way.prefixes = plan.prefixes.size();
  const int64_t count = static_cast<int64_t>(step.tokens.size());
  const int64_t ldq = world.q_columns() + 2 * h.kv_heads * h.head_dim;

  const Element nan = element_of_bits(0xffff);
  const size_t cache_size = static_cast<size_t>(world.page_count) * h.kv_heads * h.page_size * h.head_dim;
  std::vector<Element> qkv(static_cast<size_t>(count * ldq), nan), k(cache_size, nan), v(cache_size, nan);
  int64_t t = 0;
  for (const Piece& piece : pieces) {
    for (int p = 0; p < piece.end(); ++p) {
      const int64_t page = world.tables[piece.sequence][p / h.page_size];
      for (int head = 0; head < h.kv_heads; ++head) {
        const int64_t row = (page * h.kv_heads + head) * h.page_size + p % h.page_size;
        std::copy_n(world.key(piece.sequence, p, head), h.head_dim, &k[row * h.head_dim]);
        std::copy_n(world.value(piece.sequence, p, head), h.head_dim, &v[row * h.head_dim]);
      }
    }
    for (int p = piece.start; p < piece.end(); ++p, ++t) {
      for (int head = 0; head < h.heads; ++head) {
        for (int d = 0; d < h.head_dim; ++d) {
          qkv[t * ldq + head * h.head_dim + d] = world.query(piece.sequence, p, head, d);
        }
      }
    }
  }

  Buffer<Element> q_gpu(qkv.size()), k_gpu(cache_size), v_gpu(cache_size), out(count * world.q_columns());
  q_gpu.put(qkv);
  k_gpu.put(k);
  v_gpu.put(v);
  AttentionOnGpu on_gpu(step.pages, plan, h.heads, h.head_dim);
  cuda::AttentionInput input = on_gpu.input();
  if (!way.know_wide) input.wide_items = -1;
  const cuda::KvLayer kv{k_gpu.data(), v_gpu.data(), world.page_count, h.page_size, h.kv_heads, h.head_dim};
  cuda::attention(q_gpu.data(), ldq, input, kv, h.heads, out.data(), nullptr);
  synchronize(what.c_str());
  out.check_guards("out", what);
  on_gpu.check_guards(what);
  return out.get();
}

// Exact attention of one token, and the result of Hugging Face's eager 16 bits: scores, their scaling and the weights
// rounded to Element, the softmax in fp32. Both [heads * head_dim].
struct TokenReference {
  std::vector<double> exact, eager;
};

inline TokenReference reference_of(const AttentionWorld& world, int s, int position) {
  const AttentionHeads& h = world.shape;
  const auto rounded = [](double x) { return static_cast<double>(value_of(to_element(static_cast<float>(x)))); };
  const double scale = 1 / std::sqrt(static_cast<double>(h.head_dim));
  TokenReference r{std::vector<double>(world.q_columns()), std::vector<double>(world.q_columns())};
  std::vector<double> scores(position + 1), eager(position + 1), values(position + 1);
  for (int head = 0; head < h.heads; ++head) {
    const int kv_head = head / h.group();
    std::vector<double> q(h.head_dim);
    for (int d = 0; d < h.head_dim; ++d) q[d] = value_of(world.query(s, position, head, d));
    double most = -INFINITY, eager_most = -INFINITY;
    for (int p = 0; p <= position; ++p) {
      double dot = 0;
      const Element* key = world.key(s, p, kv_head);
      for (int d = 0; d < h.head_dim; ++d) dot += q[d] * value_of(key[d]);
      scores[p] = dot * scale;
      eager[p] = rounded(rounded(dot) * scale);
      most = std::max(most, scores[p]);
      eager_most = std::max(eager_most, eager[p]);
    }
    double sum = 0, eager_sum = 0;
    for (int p = 0; p <= position; ++p) {
      sum += scores[p] = std::exp(scores[p] - most);
      eager_sum += eager[p] = std::exp(eager[p] - eager_most);
    }
    for (int p = 0; p <= position; ++p) eager[p] = rounded(eager[p] / eager_sum);
    std::vector<double> exact(h.head_dim), as_eager(h.head_dim);
    for (int p = 0; p <= position; ++p) {
      const Element* value = world.value(s, p, kv_head);
      for (int d = 0; d < h.head_dim; ++d) {
        exact[d] += scores[p] * value_of(value[d]);
        as_eager[d] += eager[p] * value_of(value[d]);
      }
    }
    for (int d = 0; d < h.head_dim; ++d) {
      r.exact[head * h.head_dim + d] = exact[d] / sum;
      r.eager[head * h.head_dim + d] = rounded(as_eager[d]);
    }
  }
  return r;
}

}  // namespace refit::test
