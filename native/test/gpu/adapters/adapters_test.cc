// adapters_test [--quick] [--bench] [--seed N]: the products of adapters against double on the host; the same bits for
// a row alone and among others; nothing written beside them.
#include "cuda/forward/elementwise.h"
#include "test/gpu/adapters/adapters_times.cuh"
#include "test/gpu/adapters/adapters_world.cuh"

namespace refit::test {
namespace {

// Runs both kernels for rows with these slots. y has `ldy` columns.
template <class Out>
struct Run {
  Run(Adapters& adapters, const std::vector<int32_t>& slots, const std::vector<Element>& x, const std::vector<Out>& y,
      int64_t ldy, const std::string& what)
      : t(slots.size() * static_cast<size_t>(adapters.slices * adapters.rank)) {
    Segments segments(slots);
    Buffer<Element> gpu_x(x.size()), gpu_t(t.size());
    Buffer<Out> gpu_y(y.size());
    gpu_x.put(x), gpu_y.put(y);
    cuda::adapter_shrink(adapters.weights(), segments.get(), gpu_x.data(), adapters.K, gpu_t.data(), nullptr);
    cuda::adapter_expand(adapters.weights(), segments.get(), gpu_t.data(), gpu_y.data(), ldy, nullptr);
    synchronize(what.c_str());
    gpu_t.check_guards("t", what), gpu_y.check_guards("y", what);
    t = gpu_t.get(), this->y = gpu_y.get();
  }
  std::vector<Element> t;
  std::vector<Out> y;
};

float host_value(Element v) { return value_of(v); }
float host_value(float v) { return v; }
template <class T>
bool same_bits(const T& a, const T& b) {
  return std::memcmp(&a, &b, sizeof a) == 0;
}

void check_shrink(const Adapters& m, const std::vector<int32_t>& slots, const std::vector<Element>& x,
                  const std::vector<Element>& t, const std::string& what) {
  const int columns = m.slices * m.rank;
  for (size_t row = 0; row < slots.size(); row++) {
    for (int c = 0; c < columns; c++) {
      const float got = value_of(t[row * columns + c]);
      const int slot = slots[row], slice = c / m.rank, r = c % m.rank;
      if (slot < 0 || r >= padded_rank(m.rank_of(slot, slice))) {
        if (!CHECKF(std::isnan(got), "%s: t[%zu][%d] was written", what.c_str(), row, c)) return;
        continue;
      }
      Sum sum;
      for (int64_t k = 0; k < m.K; k++)
        sum.add(value_of(x[row * m.K + k]), value_of(m.a[(int64_t{slot} * columns + c) * m.K + k]));
      const double most = std::abs(sum.value) * kElementError + kElementQuantum + sum.size * kSumError;
      if (!CHECKF(std::abs(got - sum.value) <= most, "%s: t[%zu][%d] is %g, expected %g", what.c_str(), row, c, got,
                  sum.value))
        return;
    }
  }
}

template <class Out>
void check_expand(const Adapters& m, const std::vector<int32_t>& slots, const std::vector<Element>& t,
                  const std::vector<Out>& before, const std::vector<Out>& after, int64_t ldy, const std::string& what) {
  for (size_t row = 0; row < slots.size(); row++) {
    int64_t first = 0;
    for (int64_t n = 0, slice = 0; n < ldy; n++) {
      while (slice < m.slices && n - first == m.columns[static_cast<size_t>(slice)])
        first += m.columns[static_cast<size_t>(slice++)];
      const Out was = before[row * ldy + n], got = after[row * ldy + n];
      const int slot = slots[row], own = slot < 0 || slice == m.slices ? 0 : m.rank_of(slot, static_cast<int>(slice));
      if (own == 0) {
        if (!CHECKF(same_bits(was, got), "%s: y[%zu][%ld] was written", what.c_str(), row, static_cast<long>(n)))
          return;
        continue;
      }
      Sum sum;
      const float scale = m.entry(slot, static_cast<int>(slice))[0];
      for (int r = 0; r < own; r++) {
        sum.add(value_of(t[(row * m.slices + slice) * m.rank + r]),
                double{scale} * value_of(m.b[(slot * m.all + n) * m.rank + r]));
      }
      const double want = host_value(was) + sum.value, size = std::abs(host_value(was)) + sum.size;
      const double most =
          (sizeof(Out) == 2 ? std::abs(want) * kElementError + kElementQuantum : 0.0) + size * kSumError;
      if (!CHECKF(std::abs(host_value(got) - want) <= most, "%s: y[%zu][%ld] is %g, expected %g", what.c_str(), row,
                  static_cast<long>(n), host_value(got), want))
        return;
    }
  }
}

std::vector<Element> random_numbers(Random& random, size_t count) {
  std::vector<Element> out(count);
  for (Element& v : out) v = to_element(static_cast<float>(random.below(2001) - 1000) / 500);
  return out;
}

template <class Out>
void run_case(Random& random, int slots, int rank, int64_t K, const std::vector<int64_t>& columns, int64_t rows,
              int64_t longest) {
  Adapters adapters(random, slots, rank, K, columns);
  const std::vector<int32_t> of_rows = random_slots(random, rows, slots, longest);
  const int64_t ldy = adapters.all + (columns[0] % 8 == 0 ? 8 : 3);
  const std::string what = adapters.text() + ": " + std::to_string(rows) + " rows" + (sizeof(Out) == 4 ? ", fp32" : "");
  const std::vector<Element> x = random_numbers(random, static_cast<size_t>(rows * K));
  std::vector<Out> y;
  for (const Element v : random_numbers(random, static_cast<size_t>(rows * ldy))) y.push_back(Out(value_of(v)));
  const Run<Out> run(adapters, of_rows, x, y, ldy, what);
  check_shrink(adapters, of_rows, x, run.t, what);
  check_expand(adapters, of_rows, run.t, y, run.y, ldy, what);
  // A few rows alone.
  for (int i = 0; i < 3; i++) {
    const int64_t row = random.below(rows);
    const Run<Out> alone(adapters, {of_rows[row]}, {x.begin() + row * K, x.begin() + (row + 1) * K},
                         {y.begin() + row * ldy, y.begin() + (row + 1) * ldy}, ldy, what);
    const auto equal = [&](const auto& one, const auto& all, int64_t count) {
      return std::memcmp(one.data(), all.data() + row * count, static_cast<size_t>(count) * sizeof(one[0])) == 0;
    };
    CHECKF(equal(alone.t, run.t, int64_t{adapters.slices} * rank) && equal(alone.y, run.y, ldy),
           "%s: row %ld has other bits alone", what.c_str(), static_cast<long>(row));
  }
}

void run_cases(const Options& options) {
  Random random(options.seed);
  const std::vector<int> ranks = options.quick ? std::vector<int>{16, 48} : std::vector<int>{16, 32, 48, 64, 128, 256};
  const std::vector<int64_t> rows = options.quick ? std::vector<int64_t>{9, 530} : std::vector<int64_t>{1, 16, 65, 600};
  for (const int rank : ranks) {
    for (const int64_t count : rows) {
      const int slots = 1 + static_cast<int>(random.below(8));
      const int64_t longest = random.chance(2) ? 3 : 150;
      run_case<Element>(random, slots, rank, 136, {64, 16, 16}, count, longest);
      run_case<Element>(random, slots, rank, 1032, {96, 96}, count, longest);
      run_case<float>(random, slots, rank, 64, {328}, count, longest);
      // Rows that begin at no multiple of 16 bytes.
      run_case<Element>(random, slots, rank, 20, {20, 20}, count, longest);
      run_case<float>(random, slots, rank, 33, {51}, count, longest);
    }
  }
  // So many segments that a block computes several tiles of columns, of both slices; a row alone has a block for each.
  run_case<Element>(random, 5, 48, 64, {2056, 1032}, 150, 2);
  run_case<float>(random, 3, 16, 64, {2056}, 200, 12);
  if (options.quick) return;
  // Shapes of one rank of two of an 8B model.
  run_case<Element>(random, 3, 32, 4096, {2048, 512, 512}, 70, 40);
  run_case<Element>(random, 2, 32, 6144, {4096}, 33, 40);
  run_case<Element>(random, 2, 8 * 16, 12288, {4096}, 5, 2);
}

// The segments of `rows` rows of one slot, so many rows in each, with some that are padding.
std::vector<cuda::AdapterSegment> equal_segments(int32_t slot, int rows, int each) {
  std::vector<cuda::AdapterSegment> out;
  for (int first = 0; first < rows; first += each) out.push_back({slot, first, std::min(each, rows - first)});
  out.resize(out.size() + 2, {0, 0, 0});
  return out;
}

// t has the same bits in whatever segments its rows are and wherever shrink runs: the launcher chooses the tiles, and
// whether blocks or clusters of them compute these. They are also right.
void check_shrink_variants(uint64_t seed, int rank, int64_t K, int slices, int rows) {
  Random random(seed);
  const int32_t slot = 1;
  Adapters adapters(random, 3, rank, K, std::vector<int64_t>(static_cast<size_t>(slices), 16));
  const std::string what = adapters.text() + ": " + std::to_string(rows) + " rows of one adapter";
  const AdapterWeights w = adapters.weights();
  Buffer<Element> x(rows * K);
  const std::vector<Element> x_values = random_numbers(random, x.size());
  x.put(x_values);
  std::vector<Element> first;
  for (const int each : {64, 24, 16, 8, 3, 1}) {
    const std::vector<cuda::AdapterSegment> list = equal_segments(slot, rows, each);
    Buffer<cuda::AdapterSegment> gpu_list(list.size());
    gpu_list.put(list);
    const AdapterSegments s{gpu_list.data(), nullptr, static_cast<int>(list.size()), 0, rows, std::min(each, rows)};
    for (const bool beside : {false, true}) {
      Buffer<Element> t(rows * slices * rank);
      cuda::adapter_shrink(w, s, x.data(), K, t.data(), nullptr, beside);
      synchronize(what.c_str());
      t.check_guards("t", what);
      const std::vector<Element> got = t.get();
      if (first.empty()) {
        first = got;
        check_shrink(adapters, std::vector<int32_t>(static_cast<size_t>(rows), slot), x_values, got, what);
      }
      CHECKF(std::memcmp(got.data(), first.data(), got.size() * sizeof(Element)) == 0,
             "%s: segments of %d rows give other bits%s", what.c_str(), each, beside ? " beside others" : "");
    }
  }
}

// The same bits as expand and the activation one after the other, for rows of the base model, too.
void check_activate(uint64_t seed, Activation activation, int64_t rows, int64_t longest, int64_t inter = 328) {
  Random random(seed);
  const int64_t K = 64;
  Adapters adapters(random, 3, 48, K, {inter, inter});
  const std::vector<int32_t> slots = random_slots(random, rows, 3, longest);
  Segments segments(slots);
  const AdapterSegments s = segments.get();
  Buffer<Element> x(rows * K), t(rows * 2 * 48), y(rows * 2 * inter), together(rows * inter), apart(rows * inter);
  x.put(random_numbers(random, x.size())), y.put(random_numbers(random, y.size()));
  const AdapterWeights w = adapters.weights();
  cuda::adapter_shrink(w, s, x.data(), K, t.data(), nullptr);
  CHECK(cuda::adapter_activates(w, y.data(), together.data()));
  cuda::adapter_activate(activation, w, s, t.data(), y.data(), together.data(), nullptr);
  cuda::adapter_expand(w, s, t.data(), y.data(), 2 * inter, nullptr);
  cuda::activate_mul(activation, y.data(), apart.data(), rows, inter, nullptr);
  synchronize("the activation");
  const std::vector<Element> got = together.get(), want = apart.get();
  size_t wrong = 0;
  for (size_t i = 0; i < got.size(); i++) wrong += !same_bits(got[i], want[i]);
  CHECKF(wrong == 0, "activation of %ld rows: %zu elements differ", static_cast<long>(rows), wrong);
  together.check_guards("act", "the activation");
}

void check_gather(const Options& options) {
  Random random(options.seed + 1);
  const int slots = 3, rank = 48;
  const int64_t vocab = 50, first = 30, hidden = 64, rows = 77;
  Adapters adapters(random, slots, rank, vocab, {hidden});  // a is read as [slots * vocab, rank]
  const std::vector<int32_t> of_rows = random_slots(random, rows, slots, 9);
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < rows; i++) tokens.push_back(static_cast<int32_t>(random.below(100)));
  Segments segments(of_rows);
  Buffer<int32_t> gpu_tokens(tokens.size());
  Buffer<Element> t(static_cast<size_t>(rows * rank));
  gpu_tokens.put(tokens);
  cuda::adapter_gather(adapters.weights(), segments.get(), gpu_tokens.data(), first, vocab, t.data(), nullptr);
  synchronize("gather");
  const std::vector<Element> got = t.get();
  for (int64_t i = 0; i < rows * rank; i++) {
    const int64_t slot = of_rows[i / rank], row = tokens[i / rank] - first;
    const float value = value_of(got[i]);
    if (slot < 0) {
      CHECK(std::isnan(value));
    } else if (row < 0 || row >= vocab) {
      CHECK(value == 0.0f);
    } else {
      CHECK(value == value_of(adapters.a[(slot * vocab + row) * rank + i % rank]));
    }
  }
  t.check_guards("t", "gather");
}

// Adjacent rows of one slot are one segment up to 64 rows; those of the base model come last.
void check_segments() {
  std::vector<int32_t> slots(3, 1);
  slots.insert(slots.end(), 130, -1);
  slots.insert(slots.end(), 70, 0);
  const cuda::SegmentList out = cuda::cut_segments(slots);
  const std::vector<std::vector<int32_t>> want = {{1, 0, 3},   {0, 133, 64}, {0, 197, 6},
                                                  {-1, 3, 64}, {-1, 67, 64}, {-1, 131, 2}};
  if (!CHECK(out.list.size() == want.size())) return;
  for (size_t i = 0; i < want.size(); i++) {
    CHECK(out.list[i].slot == want[i][0] && out.list[i].first == want[i][1] && out.list[i].rows == want[i][2]);
  }
  CHECK(out.counts.count == 3 && out.counts.base_count == 3 && out.counts.rows == 73 && out.counts.most_rows == 64);
  CHECK(cuda::cut_segments({}).counts.count == 0);
}

// A list that is rounded up and read from the GPU's memory, as graphs have it, gives the same bits as the exact one.
void check_padded(uint64_t seed, int64_t rows, int64_t longest) {
  Random random(seed);
  const int64_t inter = 328, K = 72, all = 2 * inter;
  const int rank = 48;
  Adapters adapters(random, 5, rank, K, {inter, inter});
  const std::vector<int32_t> slots = random_slots(random, rows, 5, longest);
  const cuda::SegmentList cut = cuda::cut_segments(slots);
  if (cut.counts.count == 0) return;  // steps without adapters have no list
  const cuda::SegmentRoom room = cuda::segment_room(cut.counts);
  const cuda::SegmentList padded = cuda::pad_segments(cut, room, static_cast<int>(rows));
  CHECK(padded.list.size() == static_cast<size_t>(room.all()) && padded.counts.most_rows >= cut.counts.most_rows);
  Buffer<cuda::AdapterSegment> exact_list(cut.list.size()), padded_list(padded.list.size());
  exact_list.put(cut.list), padded_list.put(padded.list);
  AdapterSegments lists[] = {cut.at(exact_list.data()), padded.at(padded_list.data())};
  lists[1].host = nullptr;
  const std::vector<Element> x_values = random_numbers(random, rows * K), y_values = random_numbers(random, rows * all);
  std::vector<int32_t> token_values;
  for (int64_t i = 0; i < rows; i++) token_values.push_back(static_cast<int32_t>(random.below(2 * K)));
  Buffer<Element> x(rows * K);
  Buffer<int32_t> tokens(rows);
  x.put(x_values), tokens.put(token_values);
  const AdapterWeights w = adapters.weights();
  AdapterWeights embedding = w;
  embedding.slices = 1;
  std::vector<Element> got[2][4];
  for (const int i : {0, 1}) {
    Buffer<Element> t(rows * 2 * rank), y(rows * all), act(rows * inter), gathered(rows * rank);
    y.put(y_values);
    cuda::adapter_shrink(w, lists[i], x.data(), K, t.data(), nullptr);
    cuda::adapter_activate(Activation::kSilu, w, lists[i], t.data(), y.data(), act.data(), nullptr);
    cuda::adapter_expand(w, lists[i], t.data(), y.data(), all, nullptr);
    cuda::adapter_gather(embedding, lists[i], tokens.data(), 0, 2 * rank, gathered.data(), nullptr);
    synchronize("padded segments");
    got[i][0] = t.get(), got[i][1] = act.get(), got[i][2] = y.get(), got[i][3] = gathered.get();
    t.check_guards("t", "padded"), act.check_guards("act", "padded"), y.check_guards("y", "padded");
  }
  for (int part = 0; part < 4; part++) {
    size_t wrong = 0;
    for (size_t i = 0; i < got[0][part].size(); i++) wrong += !same_bits(got[0][part][i], got[1][part][i]);
    CHECKF(wrong == 0, "%ld rows, padded segments: %zu elements of result %d differ", static_cast<long>(rows), wrong,
           part);
  }
}

// Lists of near sizes have one room, and a room has all segments of its list.
void check_rooms() {
  const auto room = [](const std::vector<int32_t>& slots) {
    const cuda::SegmentList cut = cuda::cut_segments(slots);
    const cuda::SegmentRoom out = cuda::segment_room(cut.counts);
    CHECK(out.segments >= cut.counts.count);
    CHECK(out.base_segments >= cut.counts.base_count || out == cuda::SegmentRoom{});
    CHECK(out.segments <= 2 * cut.counts.count && out.most_rows >= cut.counts.most_rows);
    return out;
  };
  CHECK(room({0, 0, 1, 1, 1, 2}) == room({3, 4, 2, 2, 2, 2}));
  CHECK(room({0, 1, 2}) == room({-1, 4, 5, 6}));
  CHECK(!(room({0, 1, 2}) == room({0, 1})) && !(room({0}) == room(std::vector<int32_t>(9, 0))));
  CHECK(room({-1, -1}) == cuda::SegmentRoom{} && room({}) == cuda::SegmentRoom{});
  for (int count = 1; count <= 300; count++) {
    std::vector<int32_t> slots;
    for (int i = 0; i < count; i++) slots.push_back(i % 2 == 0 ? i : -1);
    room(slots);
  }
}

int run(int argc, char** argv) {
  const Options options = parse(argc, argv);
  cuda::prepare_adapters();
  if (options.bench) {
    time_adapters();
    return 0;
  }
  check_segments();
  check_rooms();
  run_cases(options);
  // Depths that are no multiple of what a warp, a block or a cluster takes; 12288 takes several rounds of loads.
  for (const int64_t K : {136, 1032, 4104, 12288}) {
    if (options.quick && K > 4104) continue;
    for (const int rank : {16, 48, 64}) check_shrink_variants(options.seed + rank, rank, K, K > 4104 ? 1 : 3, 64);
    check_shrink_variants(options.seed + 1, 32, K, 2, 200);
  }
  check_gather(options);
  for (const int64_t rows : {5, 70, 600}) {
    if (options.quick && rows > 100) continue;
    check_activate(options.seed + rows, Activation::kSilu, rows, 40);
    check_activate(options.seed + rows, Activation::kGeluTanh, rows, 700);
  }
  // Lanes share the activation of segments of one, two and four rows; a block computes several tiles of many segments.
  for (const int64_t longest : {1, 2, 4, 8, 30}) {
    check_activate(options.seed + longest, Activation::kSilu, 9, longest);
    check_activate(options.seed + longest, Activation::kSilu, 90, longest, 4104);
    check_activate(options.seed + longest, Activation::kGeluTanh, 90, longest, 4104);
  }
  for (const int64_t rows : {1, 5, 40, 70, 600}) {
    if (options.quick && rows > 100) continue;
    for (const int64_t longest : {3, 20, 200}) check_padded(options.seed + rows + longest, rows, longest);
  }
  return finish("adapters_test");
}

}  // namespace
}  // namespace refit::test

int main(int argc, char** argv) {
  try {
    return refit::test::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "adapters_test: %s\n", error.what());
    return 1;
  }
}
