// Paged attention against double precision on ragged batches, and bit for bit against itself: alone or in a batch, in
// one step or many, narrow or wide (but not with WideKernel::kHopper), divided among blocks or not, with
// shared keys read once or by each sequence. --plan stops after the tests that need no GPU, and with --bench after the
// times of plans; --hopper leaves out what the Hopper kernel does not compute; --groups leaves out what has no shared
// keys.
#include "cuda/attention/attention.h"

#include <cinttypes>

#include "test/gpu/attention/attention_bench.cuh"
#include "test/gpu/attention/attention_cases.cuh"
#include "test/gpu/attention/attention_groups_bench.cuh"
#include "test/gpu/attention/attention_plan_bench.h"
#include "test/gpu/attention/attention_plan_check.h"
#include "test/gpu/attention/attention_sharing_check.h"
#include "test/gpu/attention/attention_world.cuh"

using namespace refit;
using namespace refit::test;
using cuda::AttentionSplit;

namespace {

constexpr double kRowTolerance = cuda::of_element(1e-2, 2.5e-3);  // relative L2 error of one head of one token
constexpr double kTolerance = cuda::of_element(5e-3, 1.25e-3);    // of a whole case

// Error against the references over all tokens of the step.
void check_values(const Case& c, const AttentionWorld& world, const std::vector<Piece>& pieces,
                  const std::vector<Element>& out, double& worst, double& worst_eager) {
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
      double row_error = 0, row_eager = 0, row_size = 0;
      int worst_d = 0;
      double worst_e = -1;
      for (int d = 0; d < dim; ++d) {
        const int64_t column = static_cast<int64_t>(head) * dim + d;
        const double exact = references[i].exact[column], eager = references[i].eager[column];
        const double e = value_of(out[i * world.q_columns() + column]) - exact;
        if (!(std::abs(e) <= worst_e)) worst_e = std::abs(e), worst_d = d;
        row_error += e * e;
        row_eager += (eager - exact) * (eager - exact);
        row_size += exact * exact;
      }
      error += row_error;
      eager_error += row_eager;
      size += row_size;
      const int64_t at = static_cast<int64_t>(head) * dim + worst_d;
      // If values cancel, weights of 16 bits make a relatively large error: that of eager is allowed.
      // Written so that a NaN fails.
      const double allowed = std::max(kRowTolerance * kRowTolerance * row_size, row_eager);
      CHECKF(row_error <= allowed,
             "%s: sequence %d, position %d, head %d: error %.2e (eager: %.2e); worst at %d: expected %.6f, got %.6f",
             c.name().c_str(), tokens[i].first, tokens[i].second, head, std::sqrt(row_error / row_size),
             std::sqrt(row_eager / row_size), worst_d, references[i].exact[at],
             value_of(out[i * world.q_columns() + at]));
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
  return c.wide != cuda::WideKernel::kHopper || narrow(piece) == narrow(whole);
}

// The tokens of `pieces` in `out` are the same bits as in `all`, the result of `all_pieces`; or, if one is computed by
// the narrow kernel and the other by WideKernel::kHopper, about the same.
void check_same(const Case& c, const AttentionWorld& world, const std::vector<Piece>& all_pieces,
                const std::vector<Element>& all, const std::vector<Piece>& pieces, const std::vector<Element>& out,
                const char* how) {
  int64_t t = 0;
  for (const Piece& piece : pieces) {
    int64_t first = 0;
    size_t i = 0;
    while (all_pieces[i].sequence != piece.sequence) first += all_pieces[i++].count;
    const bool exact = same_bits(c, piece, all_pieces[i]);
    for (int p = piece.start; p < piece.end(); ++p, ++t) {
      const Element* want = &all[(first + p - all_pieces[i].start) * world.q_columns()];
      const Element* got = &out[t * world.q_columns()];
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
  size_t prefixes = 0;  // in all steps
};

void run_case(const Case& c, uint64_t seed, Worst& worst) {
  const AttentionWorld world(c.shape, c.lengths, c.shared, c.q_scale, seed, c.parents);
  std::mt19937_64 rng(seed);
  std::vector<Piece> pieces;
  for (size_t s = 0; s < c.lengths.size(); ++s) {
    pieces.push_back({static_cast<int>(s), c.starts[s], c.lengths[s] - c.starts[s]});
  }
  const std::string name = c.name();
  Way plain{AttentionSplit::kNever};
  const std::vector<Element> all = run_attention(world, pieces, plain, c.wide, name);
  check_values(c, world, pieces, all, worst.error, worst.eager);
  if (c.wide == cuda::WideKernel::kHopperExact) {
    const std::vector<Element> mma = run_attention(world, pieces, plain, cuda::WideKernel::kMma, name);
    CHECKF(std::memcmp(all.data(), mma.data(), all.size() * sizeof(Element)) == 0, "%s: other bits than mma",
           name.c_str());
  }

  const auto same = [&](const std::vector<Piece>& some, Way way, const char* how) {
    check_same(c, world, pieces, all, some, run_attention(world, some, way, c.wide, name + ": " + how), how);
    worst.prefixes += way.prefixes;
  };
  const auto same_shared = [&](const std::vector<Piece>& some) {
    same(some, {AttentionSplit::kNever, true}, "shared keys once");
    same(some, {AttentionSplit::kAuto, true}, "shared keys once, split as planned");
    same(some, {AttentionSplit::kAlways, true}, "shared keys once, every chunk a block");
  };
  same(pieces, {AttentionSplit::kAuto}, "split as planned");
  same(pieces, {AttentionSplit::kAlways}, "every chunk a block");
  same(pieces, {AttentionSplit::kAlways, true, false}, "number of wide items not known");
  if (c.parents.empty()) {
    for (const Piece& piece : pieces) same({piece}, {AttentionSplit::kAuto}, "alone");
  }
  same_shared(pieces);

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
    const AttentionSplit split = rng() % 2 == 0 ? AttentionSplit::kAuto : AttentionSplit::kAlways;
    if (more) same(some, {split, rng() % 2 == 0}, "in several steps");
  }
  // Last tokens one by one, as decode computes them.
  std::vector<Piece> last;
  for (const Piece& piece : pieces) last.push_back({piece.sequence, piece.end() - 1, 1});
  same(last, {AttentionSplit::kNever}, "the last token alone");
  std::shuffle(last.begin(), last.end(), rng);
  const size_t before = worst.prefixes;
  same_shared(last);
  const bool can_share = !c.parents.empty() && c.shape.group() <= cuda::kNarrowRows;
  CHECKF(!can_share || worst.prefixes > before, "%s: no key was shared", name.c_str());
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  check_sharing(options.seed);
  bool only_hopper = false, only_groups = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--plan") == 0) {
      if (options.bench) bench_plans();
      return finish("attention plan");
    }
    if (std::strcmp(argv[i], "--hopper") == 0) only_hopper = true;
    if (std::strcmp(argv[i], "--groups") == 0) only_groups = true;
  }
  std::mt19937_64 rng(options.seed);
  Worst worst;
  uint64_t seed = options.seed;
  std::vector<Case> all;
  if (!only_hopper && !only_groups) all = cases(options.quick, rng);
  const bool hopper = cuda::wide_kernel_here(128, false) == cuda::WideKernel::kHopper;
  for (const Case& c : group_cases(options.quick, hopper, options.seed)) all.push_back(c);
  if (!hopper) std::printf("this GPU has no Hopper kernel\n");
  if (hopper && !only_groups) {
    for (const auto wide : {cuda::WideKernel::kHopper, cuda::WideKernel::kHopperExact}) {
      for (const Case& c : hopper_cases(options.quick, wide)) all.push_back(c);
    }
  }
  for (const Case& c : all) run_case(c, ++seed, worst);
  std::printf("%zu prefixes were shared\n", worst.prefixes);
  std::printf("largest relative error of a case: %.2e (Hugging Face's eager: %.2e)\n", worst.error, worst.eager);

  Buffer<Element> some(8);
  cuda::AttentionInput none{};
  CHECK_THROWS(cuda::attention(some.data(), 8, none, {some.data(), some.data(), 1, 1, 1, 12}, 1, some.data(), nullptr),
               std::invalid_argument);
  CHECK_THROWS(cuda::attention(some.data(), 8, none, {some.data(), some.data(), 1, 1, 1, 264}, 1, some.data(), nullptr),
               std::invalid_argument);
  CHECK_THROWS(cuda::attention(some.data(), 8, none, {some.data(), some.data(), 1, 1, 2, 8}, 3, some.data(), nullptr),
               std::invalid_argument);
  none.wide = cuda::WideKernel::kHopper;
  CHECK_THROWS(cuda::attention(some.data(), 96, none, {some.data(), some.data(), 1, 1, 1, 96}, 1, some.data(), nullptr),
               std::invalid_argument);
  if (options.bench && !only_hopper) bench_groups();
  if (options.bench && !only_groups) bench_attention(!only_hopper);
  return finish("attention");
}
