// Shapes and batches for the tests of attention.
#pragma once
#include <algorithm>
#include <initializer_list>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cuda/attention/attention.h"
#include "test/gpu/attention/attention_kernels.h"
#include "test/gpu/attention/attention_world.cuh"

namespace refit::test {

struct Case {
  AttentionHeads shape;
  std::vector<int> lengths;
  std::vector<int> starts;  // first position of the compared step, per sequence
  std::vector<int> shared;  // pages shared with the parent
  float q_scale;
  cuda::WideKernel wide = cuda::WideKernel::kMma;
  std::vector<int> parents = {};  // empty: sequence 0
  std::string name() const {
    std::string s = "heads " + std::to_string(shape.heads) + "/" + std::to_string(shape.kv_heads) + " dim " +
                    std::to_string(shape.head_dim) + " page " + std::to_string(shape.page_size) + " q " +
                    std::to_string(q_scale) + (wide == cuda::WideKernel::kMma ? "" : std::string(" ") + name_of(wide)) +
                    " sequences";
    for (size_t i = 0; i < lengths.size(); ++i) {
      s += " " + std::to_string(starts[i]) + ".." + std::to_string(lengths[i]);
      if (shared[i] > 0)
        s += " (" + std::to_string(shared[i]) + " pages of " + std::to_string(parents.empty() ? 0 : parents[i]) + ")";
    }
    return s;
  }
};

inline std::vector<Case> cases(bool quick, std::mt19937_64& rng) {
  const auto pick = [&rng](std::initializer_list<int> list) {
    return list.begin()[static_cast<int>(rng() % list.size())];
  };
  const auto add_sequences = [&](Case& c, int count, int most_new, int most_start) {
    for (int s = 0; s < count; ++s) {
      const int fresh = rng() % 3 == 0 ? 1 : 1 + static_cast<int>(rng() % most_new);
      const int start = rng() % 4 == 0 ? 0 : static_cast<int>(rng() % most_start);
      c.starts.push_back(start);
      c.lengths.push_back(start + fresh);
      // Full pages that both have; a sequence writes only to pages of its own.
      const int full = std::min(start, c.starts[0]) / c.shape.page_size;
      c.shared.push_back(s > 0 && rng() % 2 == 0 ? full : 0);
    }
  };
  std::vector<Case> list;
  if (quick) {
    for (int dim : {16, 64, 72, 256}) {
      Case c{{
                 4,
                 2,
                 dim,
                 pick({1, 7, 16}),
             },
             {},
             {},
             {},
             4.0f};
      add_sequences(c, 3, 12, 330);
      list.push_back(c);
    }
    // Borders of tiles and chunks, and more chunks than the merge loads ahead.
    list.push_back({{4, 1, 16, 7}, {65, 257, 2600}, {60, 250, 2590}, {0, 0, 0}, 4.0f});
    return list;
  }
  // Each head_dim occurs with three groups, each group with several head_dims.
  const int groups[] = {1, 2, 4, 5, 7, 8, 16};
  int next = 0;
  for (int dim : {16, 32, 64, 96, 128, 256, 8, 72, 80, 112, 192}) {
    for (int i = 0; i < 3; ++i) {
      const int group = groups[next++ % 7];
      const int kv_heads = pick({1, 2, 3});
      Case c{{group * kv_heads, kv_heads, dim, pick({1, 7, 16, 64})}, {}, {}, {}, rng() % 3 == 0 ? 30.0f : 4.0f};
      add_sequences(c, 5, 90, 700);
      list.push_back(c);
    }
  }
  // Borders: of tiles (64), chunks (256) and pages; contexts of 1; long ones; groups that fill the wide tile.
  Case borders{{8, 2, 128, 16},
               {1, 64, 65, 256, 257, 512, 513, 3000, 128},
               {0, 0, 60, 255, 256, 500, 512, 2990, 127},
               std::vector<int>(9, 0),
               4.0f};
  list.push_back(borders);
  list.push_back({{64, 1, 64, 16}, {300, 7}, {290, 0}, {0, 0}, 4.0f});
  list.push_back({{33, 1, 64, 7}, {300, 7}, {290, 0}, {0, 0}, 4.0f});
  list.push_back({{4, 1, 128, 1024}, {2100, 900}, {2050, 899}, {0, 0}, 4.0f});
  list.push_back({{16, 2, 128, 16}, {700}, {0}, {0}, 4.0f});
  return list;
}

// Sequences that sample from the same prompts, with other sequences between them.
class Groups {
 public:
  Groups(const AttentionHeads& shape, cuda::WideKernel wide, uint64_t seed) : rng_(seed) {
    c_.shape = shape;
    c_.q_scale = 4.0f;
    c_.wide = wide;
  }
  // `members` whose first `pages` pages are the same, and the first `above` of these the same as those of `parent`.
  // Returns the first of them. own: most keys that a member has for itself; its token may directly follow the pages.
  int add(int members, int pages, int own, int parent = 0, int above = 0) {
    const int first = static_cast<int>(c_.starts.size());
    for (int i = 0; i < members; ++i) {
      const int keys = i % 3 == 1 ? 0 : static_cast<int>(rng_() % static_cast<uint64_t>(own + 1));
      sequence(pages * c_.shape.page_size + keys, 1, i == 0 ? parent : first, i == 0 ? above : pages);
    }
    return first;
  }
  // A sequence of `fresh` new tokens that begins with `above` pages of `parent`.
  void sequence(int start, int fresh, int parent = 0, int above = 0) {
    c_.starts.push_back(start);
    c_.lengths.push_back(start + fresh);
    c_.parents.push_back(parent);
    c_.shared.push_back(above);
  }
  const Case& done() const { return c_; }

 private:
  Case c_;
  std::mt19937_64 rng_;
};

inline std::vector<Case> group_cases(bool quick, bool hopper, uint64_t seed) {
  std::vector<Case> list;
  const auto add = [&](const AttentionHeads& shape, const auto& fill) {
    for (const auto wide : kWideKernels) {
      const bool here = hopper && (shape.head_dim == 64 || shape.head_dim == 128);
      if (wide != cuda::WideKernel::kMma && !here) continue;
      Groups groups(shape, wide, seed + list.size());
      fill(groups);
      list.push_back(groups.done());
    }
  };
  if (quick) {
    for (const int dim : {16, 72, 128, 256}) {
      add({8, 2, dim, 16}, [](Groups& g) {
        g.add(3, 31, 100);
        g.sequence(70, 20);
        g.add(2, 18, 300);
      });
    }
    return list;
  }
  // Query heads of a KV head, and members: several items of a prefix, one with few rows, and more rows than the narrow
  // kernel computes.
  int next = 0;
  const int dims[] = {64, 128, 256, 72, 16, 96, 8, 112, 192};
  const int pages[] = {16, 1, 64, 7};
  for (const auto& [group, members] : {std::pair{1, 40},
                                       {2, 33},
                                       {3, 2},
                                       {4, 17},
                                       {5, 13},
                                       {7, 10},
                                       {8, 8},
                                       {16, 5},
                                       {16, 2},
                                       {12, 6},
                                       {17, 3},
                                       {32, 2},
                                       {64, 2},
                                       {6, 11},
                                       {4, 16},
                                       {1, 2}}) {
    const int page = pages[next % 4], dim = dims[next % 9];
    // Shared keys: a tile, several, a chunk, and several with and without a rest.
    const int keys[] = {64, 448, 256, 512, 1100, 330, 832};
    add({group * 2, 2, dim, page}, [&, members = members](Groups& g) {
      g.add(members, (keys[next % 7] + page - 1) / page, 300);
      g.sequence(200, 40);
      g.sequence(90, 1);
      g.add(3, (keys[(next + 3) % 7] + page - 1) / page, 700);
    });
    ++next;
  }
  // Every number of shared tiles up to three chunks, and tokens that directly follow them.
  for (const int dim : {128, 256}) {
    add({8, 2, dim, 64}, [](Groups& g) {
      for (int tiles = 1; tiles <= 13; ++tiles) g.add(2, tiles, 200);
    });
  }
  // Many chunks; prefixes within prefixes; a prompt of which another sequence computes a piece.
  add({8, 2, 128, 16}, [](Groups& g) {
    g.add(4, 160, 900);
    g.add(2, 130, 20);
  });
  add({4, 1, 64, 16}, [](Groups& g) {
    const int system = g.add(1, 40, 30);
    const int first = g.add(4, 80, 100, system, 40);
    g.add(5, 60, 100, system, 40);
    g.add(3, 100, 100, first, 80);
    g.sequence(80 * 16, 33, first, 80);
    g.add(2, 44, 50, system, 40);
  });
  return list;
}

// For a Hopper kernel, whose tiles are 128 rows and 128 keys.
inline std::vector<Case> hopper_cases(bool quick, cuda::WideKernel wide) {
  if (quick) return {{{8, 2, 128, 16}, {330, 40, 129}, {200, 0, 0}, {0, 0, 0}, 4.0f, wide}};
  std::vector<Case> list;
  int page = 0;
  const int pages[] = {16, 1, 48, 7, 64, 8};
  for (int dim : {128, 64}) {
    // Contexts that end within a tile or chunk, at its end, and behind it; rows of one consumer, of two, of many items.
    for (int group : {1, 4, 5, 6, 7, 8, 16}) {
      list.push_back({{group * 2, 2, dim, pages[page++ % 6]},
                      {17, 130, 256, 257, 512, 769, 640, 300, 1000},
                      {0, 0, 100, 200, 255, 700, 128, 299, 640},
                      std::vector<int>(9, 0),
                      group == 5 ? 30.0f : 4.0f,
                      wide});
    }
    list.push_back({{64, 1, dim, 16}, {300, 7, 2}, {290, 0, 0}, {0, 0, 0}, 4.0f, wide});
    list.push_back({{33, 1, dim, 48}, {300, 7, 2}, {290, 0, 0}, {0, 0, 0}, 4.0f, wide});
    list.push_back({{8, 2, dim, 16}, {3000, 2950, 40}, {2870, 2900, 0}, {0, 128, 0}, 4.0f, wide});
  }
  // Several items for each multiprocessor.
  list.push_back({{32, 8, 128, 16}, {1200}, {0}, {0}, 4.0f, wide});
  return list;
}

}  // namespace refit::test
