// Paged attention against double precision on ragged batches, and bit for bit against itself: alone or in a batch, in
// one step or many, narrow or wide (but not with the Hopper kernel), divided among blocks or not. --plan stops after
// the tests that need no GPU; --hopper leaves out what the Hopper kernel does not compute.
#include <cinttypes>

#include "cuda/attention/attention.h"
#include "test/gpu/attention/attention_bench.cuh"
#include "test/gpu/attention/attention_plan_check.h"
#include "test/gpu/attention/attention_world.cuh"

using namespace refit;
using namespace refit::test;
using cuda::AttentionSplit;

namespace {

constexpr double kRowTolerance = 1e-2;  // relative L2 error of one head of one token
constexpr double kTolerance = 5e-3;     // of a whole case

struct Case {
  AttentionHeads shape;
  std::vector<int> lengths;
  std::vector<int> starts;  // first position of the compared step, per sequence
  std::vector<int> shared;  // pages shared with sequence 0
  float q_scale;
  int wide_rows = cuda::kWideRows;
  std::string name() const {
    std::string s = "heads " + std::to_string(shape.heads) + "/" + std::to_string(shape.kv_heads) + " dim " +
                    std::to_string(shape.head_dim) + " page " + std::to_string(shape.page_size) + " q " +
                    std::to_string(q_scale) + (wide_rows == cuda::kHopperRows ? " Hopper" : "") + " sequences";
    for (size_t i = 0; i < lengths.size(); ++i) {
      s += " " + std::to_string(starts[i]) + ".." + std::to_string(lengths[i]);
      if (shared[i] > 0) s += " (" + std::to_string(shared[i]) + " pages shared)";
    }
    return s;
  }
};

// Error against the references over all tokens of the step.
void check_values(const Case& c, const AttentionWorld& world, const std::vector<Piece>& pieces,
                  const std::vector<bf16>& out, double& worst, double& worst_eager) {
  std::vector<std::pair<int, int>> tokens;  // sequence, position
  for (const Piece& piece : pieces) {
    for (int p = piece.start; p < piece.end(); ++p) tokens.push_back({piece.sequence, p});
  }
  std::vector<TokenReference> references(tokens.size());
  std::vector<std::thread> threads;
  const size_t workers = std::max(1u, std::min(16u, std::thread::hardware_concurrency()));
  for (size_t w = 0; w < workers; ++w) {
    threads.emplace_back([&, w] {
      for (size_t i = w; i < tokens.size(); i += workers) {
        references[i] = reference_of(world, tokens[i].first, tokens[i].second);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();

  const int dim = c.shape.head_dim;
  double error = 0, eager_error = 0, size = 0;
  for (size_t i = 0; i < tokens.size(); ++i) {
    for (int head = 0; head < c.shape.heads; ++head) {
      double row_error = 0, row_size = 0;
      int worst_d = 0;
      double worst_e = -1;
      for (int d = 0; d < dim; ++d) {
        const int64_t column = static_cast<int64_t>(head) * dim + d;
        const double exact = references[i].exact[column], eager = references[i].eager[column];
        const double e = value_of(out[i * world.q_columns() + column]) - exact;
        if (!(std::abs(e) <= worst_e)) worst_e = std::abs(e), worst_d = d;
        row_error += e * e;
        row_size += exact * exact;
        eager_error += (eager - exact) * (eager - exact);
      }
      error += row_error;
      size += row_size;
      const int64_t at = static_cast<int64_t>(head) * dim + worst_d;
      // Written so that a NaN fails.
      CHECKF(std::sqrt(row_error) <= kRowTolerance * std::sqrt(row_size),
             "%s: sequence %d, position %d, head %d: error %.2e; worst at %d: expected %.6f, got %.6f",
             c.name().c_str(), tokens[i].first, tokens[i].second, head, std::sqrt(row_error / row_size), worst_d,
             references[i].exact[at], value_of(out[i * world.q_columns() + at]));
    }
  }
  error = std::sqrt(error / size);
  CHECKF(error <= kTolerance, "%s: error %.2e", c.name().c_str(), error);
  worst = std::max(worst, error);
  worst_eager = std::max(worst_eager, std::sqrt(eager_error / size));
}

// Whether a piece has the same bits as in `whole`, a larger piece of its sequence in another step.
bool same_bits(const Case& c, const Piece& piece, const Piece& whole) {
  const auto narrow = [&c](const Piece& p) { return p.count * c.shape.group() <= cuda::kNarrowRows; };
  return c.wide_rows == cuda::kWideRows || narrow(piece) == narrow(whole);
}

// The tokens of `pieces` in `out` are the same bits as in `all`, the result of `all_pieces`; or, if one is computed by
// the narrow and the other by the Hopper kernel, about the same.
void check_same(const Case& c, const AttentionWorld& world, const std::vector<Piece>& all_pieces,
                const std::vector<bf16>& all, const std::vector<Piece>& pieces, const std::vector<bf16>& out,
                const char* how) {
  int64_t t = 0;
  for (const Piece& piece : pieces) {
    int64_t first = 0;
    size_t i = 0;
    while (all_pieces[i].sequence != piece.sequence) first += all_pieces[i++].count;
    const bool exact = same_bits(c, piece, all_pieces[i]);
    for (int p = piece.start; p < piece.end(); ++p, ++t) {
      const bf16* want = &all[(first + p - all_pieces[i].start) * world.q_columns()];
      const bf16* got = &out[t * world.q_columns()];
      for (int head = 0; head < c.shape.heads; ++head) {
        double error = 0, size = 0;
        int differs = -1;
        for (int d = head * c.shape.head_dim; d < (head + 1) * c.shape.head_dim; ++d) {
          if (std::memcmp(want + d, got + d, 2) != 0) differs = d % c.shape.head_dim;
          error += std::pow(value_of(want[d]) - value_of(got[d]), 2);
          size += std::pow(value_of(want[d]), 2);
        }
        if (!CHECKF(exact ? differs < 0 : error <= kRowTolerance * kRowTolerance * size,
                    "%s: %s: sequence %d, position %d, head %d: expected the %s; column %d differs, error %.2e",
                    c.name().c_str(), how, piece.sequence, p, head, exact ? "same bits" : "same", differs,
                    std::sqrt(error / size))) {
          return;
        }
      }
    }
  }
}

struct Worst {
  double error = 0, eager = 0;
};

void run_case(const Case& c, uint64_t seed, Worst& worst) {
  const AttentionWorld world(c.shape, c.lengths, c.shared, c.q_scale, seed);
  std::mt19937_64 rng(seed);
  std::vector<Piece> pieces;
  for (size_t s = 0; s < c.lengths.size(); ++s) {
    pieces.push_back({static_cast<int>(s), c.starts[s], c.lengths[s] - c.starts[s]});
  }
  const std::string name = c.name();
  const std::vector<bf16> all = run_attention(world, pieces, AttentionSplit::kNever, c.wide_rows, name);
  check_values(c, world, pieces, all, worst.error, worst.eager);

  const auto same = [&](const std::vector<Piece>& some, AttentionSplit split, const char* how, bool know_wide = true) {
    check_same(c, world, pieces, all, some,
               run_attention(world, some, split, c.wide_rows, name + ": " + how, know_wide), how);
  };
  same(pieces, AttentionSplit::kAuto, "split as planned");
  same(pieces, AttentionSplit::kAlways, "every chunk a block");
  same(pieces, AttentionSplit::kAlways, "number of wide items not known", false);
  for (const Piece& piece : pieces) same({piece}, AttentionSplit::kAuto, "alone");

  // The same tokens in several steps, each with a random part of every sequence.
  std::vector<int> at = c.starts;
  for (bool more = true; more;) {
    more = false;
    std::vector<Piece> some;
    for (size_t s = 0; s < at.size(); ++s) {
      const int left = c.lengths[s] - at[s];
      if (left == 0) continue;
      const int most = rng() % 3 == 0 ? 3 : std::max(1, left / 2 + 1);
      const int count = std::min(left, static_cast<int>(1 + rng() % most));
      some.push_back({static_cast<int>(s), at[s], count});
      at[s] += count;
      more = true;
    }
    std::shuffle(some.begin(), some.end(), rng);
    if (more) same(some, rng() % 2 == 0 ? AttentionSplit::kAuto : AttentionSplit::kAlways, "in several steps");
  }
  // Last tokens one by one, as decode computes them.
  std::vector<Piece> last;
  for (const Piece& piece : pieces) last.push_back({piece.sequence, piece.end() - 1, 1});
  same(last, AttentionSplit::kNever, "the last token alone");
}

std::vector<Case> cases(bool quick, std::mt19937_64& rng) {
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

// For the Hopper kernel, whose tiles are 128 rows and 128 keys.
std::vector<Case> hopper_cases(bool quick) {
  constexpr int kRows = cuda::kHopperRows;
  if (quick) return {{{8, 2, 128, 16}, {330, 40, 129}, {200, 0, 0}, {0, 0, 0}, 4.0f, kRows}};
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
                      kRows});
    }
    list.push_back({{64, 1, dim, 16}, {300, 7, 2}, {290, 0, 0}, {0, 0, 0}, 4.0f, kRows});
    list.push_back({{33, 1, dim, 48}, {300, 7, 2}, {290, 0, 0}, {0, 0, 0}, 4.0f, kRows});
    list.push_back({{8, 2, dim, 16}, {3000, 2950, 40}, {2870, 2900, 0}, {0, 128, 0}, 4.0f, kRows});
  }
  // Several items for each multiprocessor.
  list.push_back({{32, 8, 128, 16}, {1200}, {0}, {0}, 4.0f, kRows});
  return list;
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  check_plans(options.seed);
  bool only_hopper = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--plan") == 0) return finish("attention plan");
    if (std::strcmp(argv[i], "--hopper") == 0) only_hopper = true;
  }
  std::mt19937_64 rng(options.seed);
  Worst worst;
  uint64_t seed = options.seed;
  std::vector<Case> all;
  if (!only_hopper) all = cases(options.quick, rng);
  if (cuda::wide_rows_here(128) == cuda::kHopperRows) {
    for (const Case& c : hopper_cases(options.quick)) all.push_back(c);
  } else {
    std::printf("this GPU has no Hopper kernel\n");
  }
  for (const Case& c : all) run_case(c, ++seed, worst);
  std::printf("largest relative error of a case: %.2e (Hugging Face's eager bf16: %.2e)\n", worst.error, worst.eager);

  Buffer<bf16> some(8);
  cuda::AttentionInput none{};
  CHECK_THROWS(cuda::attention(some.data(), 8, none, {some.data(), some.data(), 1, 1, 1, 12}, 1, some.data(), nullptr),
               std::invalid_argument);
  CHECK_THROWS(cuda::attention(some.data(), 8, none, {some.data(), some.data(), 1, 1, 1, 264}, 1, some.data(), nullptr),
               std::invalid_argument);
  CHECK_THROWS(cuda::attention(some.data(), 8, none, {some.data(), some.data(), 1, 1, 2, 8}, 3, some.data(), nullptr),
               std::invalid_argument);
  none.wide_rows = cuda::kHopperRows;
  CHECK_THROWS(cuda::attention(some.data(), 96, none, {some.data(), some.data(), 1, 1, 1, 96}, 1, some.data(), nullptr),
               std::invalid_argument);
  if (options.bench) bench_attention(!only_hopper);
  return finish("attention");
}
