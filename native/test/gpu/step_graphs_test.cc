// Decode steps by graphs against the same steps without: equal bit for bit, over updates in place, padding, long
// sequences, guessed tokens, blocks that grow and graphs that are dropped; and with adapters that change from step to
// step, one of them replaced between two replays. And StepGraphs alone. Argument: [seed].
#include "cuda/forward/step_graphs.h"

#include <cstdlib>
#include <numeric>
#include <stdexcept>

#include "test/gpu/forward_gpus.cuh"
#include "test/gpu/step_chats.h"

namespace {

const std::vector<Variant> kVariants = {
    {"llama", 64, 2, 4, 2, 16, 96, 101, false, false, false, false},
    {"one kv head", 64, 1, 8, 1, 128, 64, 50, false, false, true, false},
    {"qwen3 moe", 64, 3, 4, 2, 32, 96, 120, false, false, true, false, 8, 2, 32, true, {1, 0, 1}},
    {"qwen3 moe, many experts", 128, 2, 4, 4, 16, 64, 90, false, false, true, true, 64, 8, 64, false, {1, 1}},
    {"olmo2", 64, 2, 8, 2, 16, 96, 101, false, false, true, false, 0, 0, 0, true, {}, 1.0, true},
};

// Products of several runs of the streaming kernel.
const Variant kLarge = {"large", 1536, 3, 12, 3, 128, 4608, 1000, false, false, true, false};

class Pair {
 public:
  Pair(const TestModel& model, const std::vector<int>& gpus, const SlotAdapters* adapters = nullptr) {
    plain_ = std::make_unique<Gpus>(model, gpus, nullptr, adapters, kPages, false);
    graphs_ = std::make_unique<Gpus>(model, gpus, nullptr, adapters);
  }
  // slots: the adapter of each sequence; empty: none.
  StepResult step(const BatchBuilder& b, const std::string& where, const std::vector<int32_t>& slots = {}) {
    const StepResult expected = plain_->step(b, true, slots), got = graphs_->step(b, true, slots);
    for (const float p : got.top_logprobs) {
      if (!CHECKF(p == p, "%s: a NaN", where.c_str())) break;
    }
    CHECKF(same(expected, got), "%s: other bits with graphs", where.c_str());
    CHECKF(plain_->forward().graphs() == 0, "%s: a graph although they are off", where.c_str());
    return got;
  }
  void write(size_t param, const std::vector<float>& values, DType dtype = cuda::kElementType) {
    plain_->write(param, values, 0, 0, dtype), graphs_->write(param, values, 0, 0, dtype);
  }
  void check_guards(const char* name) const { plain_->check_guards(name), graphs_->check_guards(name); }
  cuda::Forward& graphs() { return graphs_->forward(); }

 private:
  std::unique_ptr<Gpus> plain_, graphs_;
};

void test_variant(const Variant& v, const std::vector<int>& gpus, unsigned seed) {
  std::mt19937 rng(seed);
  const TestModel model(v, cuda::kElementType, seed);
  const auto ranks = static_cast<int>(gpus.size());
  const CoreConfig config = model.config(ranks, 1, "", kPages, kPageSize);
  Pair pair(model, gpus);
  // 24 short chats, and one whose attention is divided.
  std::vector<Chat> chats(25);
  int32_t page = 0;
  for (size_t i = 0; i < chats.size(); ++i) {
    const int length = i == 24 ? 1100 : 1 + static_cast<int>(rng() % 20);
    for (int t = 0; t < length; ++t) chats[i].tokens.push_back(static_cast<int32_t>(rng() % v.vocab));
    for (int p = 0; p < (i == 24 ? 75 : 3); ++p) chats[i].pages.push_back(page++);
    for (int done = 0; done + 1 < length;) {
      const int take = std::min(length - 1 - done, kMaxTokens);
      BatchBuilder b;
      b.sequence({chats[i].tokens.begin() + done, chats[i].tokens.begin() + done + take}, done, chats[i].pages);
      pair.step(b, std::string(v.name) + ", prefill");
      done += take;
    }
  }
  std::vector<size_t> order(24);
  std::iota(order.begin(), order.end(), 0u);
  size_t most = 0;
  for (int step = 0; step < 72; ++step) {
    const std::string where = std::string(v.name) + ", step " + std::to_string(step);
    std::shuffle(order.begin(), order.end(), rng);
    constexpr size_t kSizes[] = {1, 3, 4, 7, 8, 9, 16, 17, 20, 24};
    std::vector<size_t> which(order.begin(), order.begin() + static_cast<long>(kSizes[rng() % std::size(kSizes)]));
    // A chat has room for 28 more tokens.
    std::erase_if(which, [&](size_t i) { return chats[i].tokens.size() >= 47; });
    if (step % 3 == 1) which.push_back(24);
    if (which.empty()) which.push_back(24);
    if (step % 4 == 2) {
      std::vector<std::vector<int32_t>> guesses(which.size());
      for (size_t i = 0; i < which.size(); ++i) {
        const size_t room = chats[which[i]].pages.size() * kPageSize - chats[which[i]].tokens.size();
        guesses[i].resize(rng() % std::min<size_t>(room + 1, 6));
        for (int32_t& token : guesses[i]) token = static_cast<int32_t>(rng() % v.vocab);
      }
      const BatchBuilder guessing = guess(chats, which, guesses, v.vocab, static_cast<unsigned>(step) * 1000u);
      pair.step(guessing, where + ", guesses");
      pair.step(guessing, where + ", guesses again");
    }
    const StepResult result = pair.step(decode(chats, which, v.vocab, static_cast<unsigned>(step) * 1000u), where);
    for (size_t i = 0; i < which.size(); ++i) chats[which[i]].tokens.push_back(result.tokens[i]);
    most = std::max(most, pair.graphs().graphs());
    if (step % 12 == 11) {
      // Every weight gets other values in place, and graphs stay.
      const size_t held = pair.graphs().graphs();
      for (size_t p = 0; p < config.params.size(); ++p) {
        std::vector<float> values = model.shard(config.params[p].name, 0, ranks).x;
        for (float& x : values) x *= 1.0f + 0.25f * static_cast<float>(rng() % 1000) / 1000.0f;
        pair.write(p, values);
      }
      CHECKF(pair.graphs().graphs() == held, "%s: a write in place dropped graphs", where.c_str());
    }
    if (step == 30) pair.graphs().drop_graphs();
    if (step == 50) {
      // 8 MB of history: the block grows, and every address with it.
      BatchBuilder grown = decode(chats, {24}, v.vocab, 7);
      BatchBuilder::Row row{.token = 0, .temperature = 0, .presence = 1.0f};
      for (int i = 0; i < 2000000; ++i) row.history.push_back(i % v.vocab);
      grown.row(row);
      pair.step(grown, where + ", grown");
      CHECKF(pair.graphs().graphs() == 0, "%s: graphs outlive their addresses", where.c_str());
    }
  }
  CHECKF(most >= 4, "%s: only %zu graphs", v.name, most);
  pair.check_guards(v.name);
  std::printf("%-26s %d ranks%s: equal with and without graphs; %zu graphs at once\n", v.name, ranks,
              ranks > 1 && gpus[0] != gpus[1] ? " on GPUs of their own" : "", most);
}

// Right guesses have the bits of decode steps, as far as products do not depend on the number of rows
// (gemm_stream.cuh).
void test_guesses(const Variant& v, size_t count, size_t guessed, unsigned seed) {
  std::mt19937 rng(seed);
  const TestModel model(v, cuda::kElementType, seed);
  Gpus gpu(model, {0});
  std::vector<Chat> chats(count);
  std::vector<size_t> all(count);
  std::iota(all.begin(), all.end(), 0u);
  for (size_t i = 0; i < chats.size(); ++i) {
    for (int p = 0; p < 40; ++p) chats[i].pages.push_back(static_cast<int32_t>(40 * i) + p);
    // A context crosses the border of a chunk of keys.
    for (size_t t = 0; t < (i == 1 ? 5 : 253); ++t) chats[i].tokens.push_back(static_cast<int32_t>(rng() % v.vocab));
    for (int done = 0; done + 1 < static_cast<int>(chats[i].tokens.size());) {
      const int take = std::min(static_cast<int>(chats[i].tokens.size()) - 1 - done, kMaxTokens);
      BatchBuilder b;
      b.sequence({chats[i].tokens.begin() + done, chats[i].tokens.begin() + done + take}, done, chats[i].pages);
      gpu.step(b);
      done += take;
    }
  }
  const std::vector<Chat> before = chats;
  std::vector<std::vector<int32_t>> guesses(count);
  std::vector<std::vector<float>> logprobs(count);
  for (size_t t = 0; t <= guessed; ++t) {
    const StepResult result = gpu.step(decode(chats, all, v.vocab, 9));
    for (size_t i = 0; i < count; ++i) {
      chats[i].tokens.push_back(result.tokens[i]);
      if (t < guessed) guesses[i].push_back(result.tokens[i]);
      const auto row = result.top_logprobs.begin() + static_cast<long>(i) * v.vocab;
      logprobs[i].insert(logprobs[i].end(), row, row + v.vocab);
    }
  }
  gpu.forward().drop_graphs();
  for (int turn = 0; turn < 3; ++turn) {  // launched, captured, by the graph
    const StepResult result = gpu.step(guess(before, all, guesses, v.vocab, 9));
    const size_t each = (guessed + 1) * v.vocab;
    for (size_t i = 0; i < count; ++i) {
      const auto rows = result.top_logprobs.begin() + static_cast<long>(i * each);
      CHECKF(std::equal(logprobs[i].begin(), logprobs[i].end(), rows), "%s: chat %zu has other bits with guesses",
             v.name, i);
    }
  }
  CHECKF(gpu.forward().graphs() == 1, "%s: %zu graphs of steps with guesses", v.name, gpu.forward().graphs());
  std::printf("%-26s %zu guesses of %zu chats have the bits of decode steps\n", v.name, guessed, count);
}

// Two sets of weights that change places: each step equals that of an engine whose only set was written in place.
void test_sets(const Variant& v, const std::vector<int>& gpus, unsigned seed) {
  std::mt19937 rng(seed);
  const auto ranks = static_cast<int>(gpus.size());
  const TestModel models[] = {{v, cuda::kElementType, seed}, {v, cuda::kElementType, seed + 1}};
  const CoreConfig config = models[0].config(ranks, 1, "", kPages, kPageSize);
  Gpus plain(models[0], gpus, nullptr, nullptr, kPages, false),
      both(models[0], gpus, nullptr, nullptr, kPages, true, 2);
  const auto write = [&](Gpus& to, int model, int set) {
    for (int r = 0; r < ranks; ++r) {
      for (size_t p = 0; p < config.params.size(); ++p)
        to.write(p, models[model].shard(config.params[p].name, r, ranks).x, set, static_cast<size_t>(r));
    }
  };
  write(both, 1, 1);
  std::vector<Chat> chats(9);
  int32_t page = 0;
  for (Chat& chat : chats) {
    chat.tokens.push_back(static_cast<int32_t>(rng() % v.vocab));
    for (int p = 0; p < 4; ++p) chat.pages.push_back(page++);
  }
  std::vector<size_t> all(chats.size());
  std::iota(all.begin(), all.end(), 0u);
  int set = 0;
  for (int step = 0; step < 40; ++step) {
    // A swap at once, after one step, after several; also before the first graph and with a size that is new.
    const std::string where = std::string(v.name) + ", sets, step " + std::to_string(step);
    if (step == 1 || step == 2 || (step > 6 && rng() % 3 == 0)) {
      set ^= 1;
      write(plain, set, 0);
    }
    const std::vector<size_t> which(all.begin(), all.begin() + (step % 5 == 4 ? 9 : 3));
    const BatchBuilder b = decode(chats, which, v.vocab, static_cast<unsigned>(step) * 100u);
    const StepResult expected = plain.step(b), got = both.step(b, true, {}, set);
    CHECKF(same(expected, got), "%s: set %d has other bits", where.c_str(), set);
    for (size_t i = 0; i < which.size(); ++i) chats[which[i]].tokens.push_back(got.tokens[i]);
  }
  const size_t graphs = both.forward().graphs();
  CHECKF(graphs >= 4 * static_cast<size_t>(ranks) && graphs % (2 * static_cast<size_t>(ranks)) == 0, "%s: %zu graphs",
         v.name, graphs);
  both.check_guards(v.name);
  std::printf("%-26s %d ranks: two sets by turns; %zu graphs\n", v.name, ranks, graphs);
}

// The content of one slot becomes that of the same slot of `other`; rank 0's part of it.
void replace_slot(Pair& pair, const CoreConfig& config, const SlotAdapters& now, const SlotAdapters& other, int slot) {
  for (size_t p = 0; p < config.params.size(); ++p) {
    const Param& param = config.params[p];
    if (is_weight(param)) continue;
    std::vector<float> values = now.values(param.name, 0, config.ranks);
    const std::vector<float> next = other.values(param.name, 0, config.ranks);
    const size_t each = values.size() / static_cast<size_t>(config.adapter_slots), begin = each * slot;
    std::copy(next.begin() + begin, next.begin() + begin + each, values.begin() + begin);
    pair.write(p, values, param.dtype);
  }
}

// Steps whose sequences use other adapters each time, in other numbers, beside steps of the base model alone.
void test_adapters(const Variant& v, const std::vector<int>& gpus, unsigned seed) {
  constexpr int kSlots = 5;
  std::mt19937 rng(seed);
  const TestModel model(v, cuda::kElementType, seed);
  const SlotAdapters adapters(model, kSlots, 32, seed + 1), others(model, kSlots, 32, seed + 2);
  CoreConfig config = model.config(static_cast<int>(gpus.size()), 1, "", kPages, kPageSize);
  adapters.extend(config);
  Pair pair(model, gpus, &adapters);
  std::vector<Chat> chats(24);
  for (size_t i = 0; i < chats.size(); ++i) {
    for (int p = 0; p < 6; ++p) chats[i].pages.push_back(static_cast<int32_t>(6 * i + p));
    chats[i].tokens.push_back(static_cast<int32_t>(rng() % v.vocab));
  }
  size_t most = 0, repeated = 0;
  for (int step = 0; step < 60; ++step) {
    const std::string where = std::string(v.name) + ", adapters, step " + std::to_string(step);
    constexpr size_t kSizes[] = {1, 3, 8, 20, 24};
    const size_t count = kSizes[rng() % std::size(kSizes)];
    std::vector<size_t> which(chats.size());
    std::iota(which.begin(), which.end(), 0u);
    std::shuffle(which.begin(), which.end(), rng);
    which.resize(count);
    // As the scheduler orders them, and now and then in any order. Few adapters or all; or none.
    std::vector<int32_t> slots(count, -1);
    const int used = step % 6 == 5 ? 0 : 1 + static_cast<int>(rng() % kSlots), first = static_cast<int>(rng() % kSlots);
    for (int32_t& slot : slots) {
      if (used > 0 && rng() % 4 != 0) slot = (first + static_cast<int32_t>(rng() % used)) % kSlots;
    }
    if (step % 4 != 3) std::sort(slots.begin(), slots.end());
    const BatchBuilder batch = decode(chats, which, v.vocab, static_cast<unsigned>(step) * 1000u);
    StepResult result = pair.step(batch, where, slots);
    // The same step again, by its graph; and then with another adapter in one of its slots.
    const size_t held = pair.graphs().graphs();
    CHECKF(same(pair.step(batch, where + " again", slots), result), "%s: other bits again", where.c_str());
    repeated += pair.graphs().graphs() == held;
    if (step % 5 == 4 && used > 0) {
      replace_slot(pair, config, adapters, others, first);
      const size_t before = pair.graphs().graphs();
      const StepResult replaced = pair.step(batch, where + ", replaced", slots);
      CHECKF(pair.graphs().graphs() >= before, "%s: a replaced adapter dropped graphs", where.c_str());
      const bool uses = std::find(slots.begin(), slots.end(), first) != slots.end();
      CHECKF(uses != same(replaced, result), "%s: the new adapter in slot %d %s", where.c_str(), first,
             uses ? "changes nothing" : "changes others");
      result = replaced;
      replace_slot(pair, config, adapters, adapters, first);
    }
    for (size_t i = 0; i < count; ++i) chats[which[i]].tokens.push_back(result.tokens[i]);
    most = std::max(most, pair.graphs().graphs());
  }
  CHECKF(most >= 6 && repeated >= 6, "%s: only %zu graphs, %zu steps by one", v.name, most, repeated);
  pair.check_guards(v.name);
  std::printf("%-26s %zu ranks%s: adapters equal with and without graphs; %zu graphs at once\n", v.name, gpus.size(),
              gpus.size() > 1 && gpus[0] != gpus[1] ? " on GPUs of their own" : "", most);
}

// StepGraphs alone: which launches it makes, how many graphs it keeps, and failures in a capture.
void test_graphs_alone() {
  cuda::Rank rank(0, 0);
  uint8_t* bytes = nullptr;
  check(cudaMalloc(reinterpret_cast<void**>(&bytes), 4096), "cudaMalloc");
  auto task = rank.run([&] {
    cuda::StepGraphs graphs(rank, true, 1);
    int launched = 0;
    const auto run = [&](int tokens) {
      check(cudaMemsetAsync(bytes, 0xee, 4096, rank.stream), "memset");
      const auto launch = [&](int /* set */) {
        ++launched;
        check(cudaMemsetAsync(bytes + tokens, tokens, 1, rank.stream), "memset");
      };
      const cuda::StepRoom room{tokens, tokens, 0, 0, true, {}};
      if (graphs.wants(room)) graphs.make(room, launch);
      graphs.run(room, 0, launch);
      std::vector<uint8_t> host(4096);
      check(cudaMemcpyAsync(host.data(), bytes, 4096, cudaMemcpyDeviceToHost, rank.stream), "copy");
      check(cudaStreamSynchronize(rank.stream), "synchronize");
      std::vector<uint8_t> expected(4096, 0xee);
      expected[tokens] = static_cast<uint8_t>(tokens);
      CHECKF(host == expected, "room %d wrote other bytes", tokens);
    };
    for (int turn = 0; turn < 4; ++turn) run(3);
    CHECKF(launched == 2 && graphs.size() == 1, "launched %d times, %zu graphs", launched, graphs.size());
    const int most = static_cast<int>(cuda::StepGraphs::kMost);
    for (int turn = 0; turn < 3; ++turn) {
      for (int i = 0; i < most; ++i) run(100 + i);
    }
    CHECKF(static_cast<int>(graphs.size()) == most, "%zu graphs", graphs.size());
    launched = 0;
    run(3);  // forgotten
    CHECKF(launched == 1 && static_cast<int>(graphs.size()) == most - 1, "launched %d times", launched);
    run(7);
    bool thrown = false;
    try {
      graphs.make({7, 7, 0, 0, true, {}}, [](int) { throw std::runtime_error("a launch fails"); });
    } catch (const std::runtime_error&) {
      thrown = true;
    }
    CHECK(thrown && graphs.wants({7, 7, 0, 0, true, {}}));
    // With two sets: both graphs or none.
    const cuda::StepRoom pair{7, 7, 0, 0, true, {}};
    cuda::StepGraphs both(rank, true, 2);
    const auto launch = [&](int set) { check(cudaMemsetAsync(bytes, set, 1, rank.stream), "memset"); };
    both.run(pair, 1, launch);
    thrown = false;
    try {
      both.make(pair, [&](int set) {
        if (set == 1) throw std::runtime_error("a launch fails");
        launch(set);
      });
    } catch (const std::runtime_error&) {
      thrown = true;
    }
    CHECK(thrown && both.size() == 0 && both.wants(pair));
    both.make(pair, launch);
    CHECK(both.size() == 2);
    run(7);
    run(7);
    graphs.clear();
    CHECK(graphs.size() == 0);
    run(3);
  });
  cuda::wait(task);
  check(cudaFree(bytes), "cudaFree");
}

}  // namespace

int main(int argc, char** argv) {
  // Before CUDA starts: a kernel that is loaded at its first launch may wait for a GPU that spins in a collective.
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);  // ranks on one GPU must not share a queue
  const unsigned seed = argc > 1 ? static_cast<unsigned>(std::atoi(argv[1])) : 1;
  test_graphs_alone();
  test_guesses(kLarge, 1, 15, seed);
  int gpus = 0;
  check(cudaGetDeviceCount(&gpus), "cudaGetDeviceCount");
  for (const Variant& v : kVariants) {
    test_variant(v, {0}, seed);
    // The experts' kernels choose tiles by the number of tokens.
    if (v.experts == 0) test_guesses(v, 2, 6, seed), test_guesses(v, 1, 15, seed);
    test_sets(v, {0}, seed);
    test_adapters(v, {0}, seed);
    if (v.heads % 2 == 0 && v.kv_heads > 1) {
      test_variant(v, {0, 0}, seed);
      test_sets(v, {0, 0}, seed);
      test_adapters(v, {0, 0}, seed);
    }
    if (gpus > 1 && all_reach({0, 1})) test_variant(v, {0, 1}, seed);
  }
  return finish("step_graphs_test");
}
