// moe_test [--quick] [--bench] [--seed N]: a mixture of experts with each of its kernels: the choice and order of
// experts exactly, the products against double, and their speed.
#include <algorithm>
#include <numeric>
#include <set>

#include "cuda/device/current_gpu.h"
#include "cuda/moe/moe_kernels.h"
#include "test/gpu/matrix_common.cuh"
#include "test/gpu/moe_gather.cuh"
#include "test/gpu/moe_reference.cuh"

namespace refit::test {
namespace {

void run_case(Gemm& gemm, const Case& c, uint64_t seed) {
  Problem problem(c, seed);
  const MoeShape& s = c.shape;
  const int64_t turn = c.turn != 0 ? c.turn : c.tokens;
  Buffer<Element> y(c.tokens * s.hidden);
  const int64_t stride = s.per_token + 3;
  Buffer<uint16_t> record(c.tokens * stride);
  const auto run = [&](const MoeShape& shape, const Element* w13, const Element* w2, bool partial, ExpertKernel kernel,
                       const std::string& what) {
    const size_t bytes = Moe::scratch_bytes(shape, turn);
    Buffer<uint8_t> scratch(bytes);
    Moe moe(shape, gemm, scratch.data(), bytes);
    moe.force(kernel);
    y.poison();
    record.put(std::vector<uint16_t>(record.size(), kUnwritten));
    moe.run(problem.x.data(), problem.router.data(), w13, w2, y.data(), c.tokens, partial, nullptr,
            {record.data(), stride});
    synchronize(what.c_str());
    scratch.check_guards("the scratch", what);
    record.check_guards("the record", what);
    check_record(c, record.get(), stride, problem.routes, what);
    y.check_guards("y", what);
    if (turn >= c.tokens && kernel != ExpertKernel::kAuto) {
      const bool even = shape.hidden % 8 == 0 && shape.inter % 8 == 0;
      check_routes(c, cuda::carve_moe_scratch(shape, c.tokens, scratch.data()), problem.routes,
                   even ? cuda::rows_of(kernel) : 64, what);
    }
    return y.get();
  };
  for (const ExpertKernel kernel : c.kernels) {
    std::string what = c.text(kernel, false);
    check_sum(c, problem, {run(s, problem.w13.data(), problem.w2.data(), false, kernel, what)}, false, what);
    what = c.text(kernel, true);
    check_sum(c, problem, {run(s, problem.w13.data(), problem.w2.data(), true, kernel, what)}, true, what);
  }
  if (s.inter % 2 != 0) return;
  MoeShape half = s;
  half.inter = s.inter / 2;
  std::vector<std::vector<Element>> shares;
  const std::string what = c.text(c.kernels[0], true) + " in two halves";
  for (int rank = 0; rank < 2; rank++) {
    Buffer<Element> half13(problem.w13.size() / 2), half2(problem.w2.size() / 2);
    launch_half(problem.w13.data(), problem.w2.data(), rank, s.experts, s.hidden, s.inter, half13.data(), half2.data());
    shares.push_back(run(half, half13.data(), half2.data(), true, c.kernels[0], what));
  }
  check_sum(c, problem, shares, true, what);
}

std::vector<ExpertKernel> every_kernel() {
  std::vector<ExpertKernel> all = {ExpertKernel::kAuto,    ExpertKernel::kStream8, ExpertKernel::kStream16,
                                   ExpertKernel::kTile64,  ExpertKernel::kTile128, ExpertKernel::kWgmma64,
                                   ExpertKernel::kWgmma256};
  if (!cuda::has_wgmma()) all.resize(all.size() - 2);
  return all;
}

void run_cases(Gemm& gemm, const Options& options) {
  const std::vector<ExpertKernel> all = every_kernel();
  uint64_t seed = options.seed;
  const MoeShape small{8, 2, true, 64, 32};
  for (int64_t tokens : options.quick ? std::vector<int64_t>{1, 9, 70} : std::vector<int64_t>{1, 2, 7, 9, 64, 300}) {
    for (Router router : {Router::kRandom, Router::kTies, Router::kEqual, Router::kOne, Router::kEmpty}) {
      if (options.quick && tokens != 9 && router != Router::kRandom) continue;
      Case c{small, tokens};
      c.router = router;
      c.kernels = all;
      c.shape.norm_topk_prob = seed % 2;
      run_case(gemm, c, seed++);
    }
  }
  Case nan{small, 9};
  nan.nan = true;
  nan.kernels = all;
  run_case(gemm, nan, seed++);
  Case turns{small, 50};
  turns.turn = 16;
  turns.kernels = all;
  run_case(gemm, turns, seed++);
  // Odd sizes: rows and halves that do not begin at 16 bytes, an odd hidden size; all numbers of experts per lane.
  for (const MoeShape& shape : {MoeShape{5, 3, true, 70, 36},
                                {3, 1, false, 33, 7},
                                {1, 1, true, 64, 16},
                                {40, 4, false, 72, 24},
                                {200, 8, true, 64, 40},
                                {1000, 32, true, 64, 8},
                                {256, 5, false, 136, 152},
                                {8, 2, true, 64, 32, Activation::kGeluTanh},
                                {5, 3, true, 70, 36, Activation::kGeluTanh}}) {
    for (int64_t tokens : {1, 33}) {
      Case c{shape, tokens};
      c.router = tokens == 1 ? Router::kRandom : Router::kTies;
      c.kernels = options.quick ? std::vector<ExpertKernel>{ExpertKernel::kAuto, all.back()} : all;
      run_case(gemm, c, seed++);
    }
  }
  if (options.quick) return;
  // The last has few experts, so their tiles have up to 256 rows.
  for (int64_t tokens : {1, 7, 64, 300, 4500}) {
    Case c{{128, 8, true, 2048, 768}, tokens};
    if (tokens == 4500) c.shape = {12, 2, true, 256, 200};
    c.kernels = all;
    run_case(gemm, c, seed++);
  }
  Case one{{128, 8, true, 2048, 768}, 200};
  one.router = Router::kOne;
  one.kernels = all;
  run_case(gemm, one, seed++);
}

// Tokens of padding take no expert and change no other row, whatever they contain.
void check_padding(Gemm& gemm, const Options& options) {
  Case c{{16, 4, true, 64, 32}, 24};
  c.kernels = every_kernel();
  const int64_t real = 19, k = c.shape.per_token;
  Problem problem(c, options.seed);
  Buffer<Element> x(c.tokens * c.shape.hidden), y(c.tokens * c.shape.hidden);
  std::vector<Element> values = problem.x.get();
  std::fill(values.begin() + real * c.shape.hidden, values.end(), to_element(NAN));
  x.put(values);
  std::vector<int32_t> slots(c.tokens, 5);
  std::fill(slots.begin() + real, slots.end(), -1);
  Buffer<int32_t> kv_slots(c.tokens);
  kv_slots.put(slots);
  Buffer<uint16_t> record(c.tokens * k);
  const size_t bytes = Moe::scratch_bytes(c.shape, c.tokens);
  for (const ExpertKernel kernel : c.kernels) {
    const std::string what = c.text(kernel, false) + " with padding";
    Buffer<uint8_t> memory(bytes);
    Moe moe(c.shape, gemm, memory.data(), bytes);
    moe.force(kernel);
    const auto run = [&](const Element* from, const int32_t* marks) {
      y.poison();
      moe.run(from, problem.router.data(), problem.w13.data(), problem.w2.data(), y.data(), c.tokens, false, nullptr,
              {record.data(), k}, {}, marks);
      synchronize(what.c_str());
      return y.get(real * c.shape.hidden);
    };
    record.put(std::vector<uint16_t>(record.size(), kUnwritten));
    const std::vector<Element> padded = run(x.data(), kv_slots.data());
    const std::vector<uint16_t> chosen = record.get();
    CHECKF(std::all_of(chosen.begin() + real * k, chosen.end(), [](uint16_t e) { return e == kUnwritten; }),
           "%s: padding has a record", what.c_str());
    const auto scratch = cuda::carve_moe_scratch(c.shape, c.tokens, memory.data());
    std::vector<cuda::RowTile> tiles(cuda::max_row_tiles(c.tokens * k, c.shape.experts, 8));
    int32_t count = 0;
    cuda::check(cudaMemcpy(&count, scratch.tile_count, sizeof count, cudaMemcpyDeviceToHost), "tile count");
    cuda::check(cudaMemcpy(tiles.data(), scratch.tiles, tiles.size() * sizeof tiles[0], cudaMemcpyDeviceToHost),
                "tiles");
    int64_t rows = 0;
    for (int32_t i = 0; i < count; i++) rows += tiles[i].rows;
    CHECKF(rows == real * k, "%s: tiles of %lld rows", what.c_str(), static_cast<long long>(rows));
    const std::vector<Element> whole = run(problem.x.data(), nullptr);
    CHECKF(std::memcmp(padded.data(), whole.data(), padded.size() * sizeof(Element)) == 0, "%s: other bits",
           what.c_str());
  }
}

// All kernels that a Gemm of SumOrder::kAscending allows give the same bits, for a token alone and beside others.
void check_order(const Options& options) {
  Buffer<uint8_t> workspace(kWorkspace);
  Gemm gemm(workspace.data(), kWorkspace, cuda::SumOrder::kAscending);
  for (const MoeShape& shape :
       {MoeShape{128, 8, true, 2048, 768}, {16, 4, false, 256, 128}, {8, 2, true, 70, 36}, {4, 2, true, 1024, 512}}) {
    for (const bool partial : {false, true}) {
      Case c{shape, 2000};
      Problem problem(c, options.seed);
      const size_t bytes = Moe::scratch_bytes(shape, c.tokens);
      Buffer<uint8_t> memory(bytes);
      Buffer<Element> y(c.tokens * shape.hidden), x(c.tokens * shape.hidden);
      Moe moe(shape, gemm, memory.data(), bytes);
      std::vector<Element> whole;
      for (const int64_t tokens :
           {c.tokens, int64_t{700}, int64_t{129}, int64_t{64}, int64_t{9}, int64_t{8}, int64_t{1}}) {
        moe.load(x.data(), problem.router.data(), tokens, nullptr);
        std::vector<ExpertKernel> kernels = {ExpertKernel::kAuto, ExpertKernel::kTile64, ExpertKernel::kTile128};
        if (cuda::has_wgmma()) kernels.insert(kernels.end(), {ExpertKernel::kWgmma64, ExpertKernel::kWgmma256});
        for (const ExpertKernel kernel : kernels) {
          y.poison();
          moe.force(kernel);
          moe.run(problem.x.data() + (c.tokens - tokens) * shape.hidden, problem.router.data(), problem.w13.data(),
                  problem.w2.data(), y.data(), tokens, partial, nullptr);
          synchronize("an order");
          const std::vector<Element> got = y.get(tokens * shape.hidden);
          if (whole.empty()) whole = got;
          CHECKF(std::memcmp(got.data(), &whole[(c.tokens - tokens) * shape.hidden], got.size() * sizeof(Element)) == 0,
                 "%s partial=%d, the last %lld: other bits", c.text(kernel, partial).c_str(), partial,
                 static_cast<long long>(tokens));
        }
      }
    }
  }
}

void check_gathers(Gemm& gemm, const Options& options) {
  for (const MoeShape& shape : {MoeShape{16, 4, true, 256, 128}, {8, 2, false, 64, 32}, {5, 3, true, 72, 40}}) {
    for (const int64_t tokens : {1, 9, 150}) {
      Case c{shape, tokens};
      if (tokens == 150) c.turn = 64;
      c.kernels = {ExpertKernel::kTile64, ExpertKernel::kTile128};
      if (cuda::has_wgmma()) c.kernels.insert(c.kernels.end(), {ExpertKernel::kWgmma64, ExpertKernel::kWgmma256});
      for (const int ranks : {2, 4}) check_gathering(gemm, c, ranks, options.seed);
    }
  }
}

void check_refusals(Gemm& gemm) {
  Buffer<uint8_t> scratch(1 << 20);
  CHECK_THROWS(Moe({0, 1, true, 64, 32}, gemm, scratch.data(), scratch.size()), std::invalid_argument);
  CHECK_THROWS(Moe({8, 9, true, 64, 32}, gemm, scratch.data(), scratch.size()), std::invalid_argument);
  CHECK_THROWS(Moe({2048, 2, true, 64, 32}, gemm, scratch.data(), scratch.size()), std::invalid_argument);
  CHECK_THROWS(Moe({8, 2, true, 64, 32}, gemm, scratch.data(), 1000), std::invalid_argument);
  CHECK_THROWS(Moe({8, 2, true, 64, 32, Activation::kSilu, 0, 3}, gemm, scratch.data(), scratch.size()),
               std::invalid_argument);
}

void run_bench(Gemm& gemm) {
  const MoeShape s{128, 8, true, 2048, 768};  // a layer of Qwen3-30B-A3B
  const int64_t most = 8192, spare = 64;
  Buffer<Element> x((most + spare) * s.hidden), router(s.experts * s.hidden), y(most * s.hidden);
  Buffer<Element> w13(s.experts * 2 * s.inter * s.hidden), w2(s.experts * s.hidden * s.inter);
  fill(x.data(), most + spare, s.hidden, s.hidden, 1.0f, 1);
  fill(router.data(), s.experts, s.hidden, s.hidden, 0.1f, 2);
  fill(w13.data(), s.experts * 2 * s.inter, s.hidden, s.hidden, 0.05f, 3);
  fill(w2.data(), s.experts * s.hidden, s.inter, s.inter, 0.05f, 4);
  Buffer<uint32_t> to(1);
  const double bandwidth = read_bandwidth(w13.data(), w13.bytes(), to.data());
  const size_t bytes = Moe::scratch_bytes(s, most);
  Buffer<uint8_t> memory(bytes);
  Moe moe(s, gemm, memory.data(), bytes);
  std::printf("read %.0f GB/s; scratch for %lld tokens %.0f MB\n", bandwidth, static_cast<long long>(most),
              bytes * 1e-6);
  std::printf("%6s %9s %8s %9s %9s %7s %9s | us of router choose sort gate_up down combine\n", "tokens", "kernel",
              "experts", "us", "GB/s", "of read", "TFLOP/s");
  constexpr struct {
    ExpertKernel kernel;
    const char* name;
    int64_t least, most;  // tokens for which it is measured
  } kKernels[] = {{ExpertKernel::kAuto, "auto", 1, 8192},           {ExpertKernel::kStream8, "stream 8", 1, 32},
                  {ExpertKernel::kStream16, "stream 16", 4, 128},   {ExpertKernel::kTile64, "tile 64", 32, 1024},
                  {ExpertKernel::kTile128, "tile 128", 512, 8192},  {ExpertKernel::kWgmma64, "wgmma 64", 4, 1024},
                  {ExpertKernel::kWgmma256, "wgmma 256", 256, 8192}};
  const int processors = cuda::multiprocessors();
  for (int64_t tokens : {1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 8192}) {
    const MoeScratch scratch = cuda::carve_moe_scratch(s, tokens, memory.data());
    for (const auto& [kernel, name, least, most_tokens] : kKernels) {
      const bool wgmma = kernel == ExpertKernel::kWgmma64 || kernel == ExpertKernel::kWgmma256;
      if (tokens < least || tokens > most_tokens || (wgmma && !moe.has_wgmma())) continue;
      moe.force(kernel);
      const auto at = [&](int i) { return x.data() + i % spare * s.hidden; };  // other tokens, other experts
      const double us = microseconds(tokens <= 64 ? 64 : 16, [&](int i) {
        moe.run(at(i), router.data(), w13.data(), w2.data(), y.data(), tokens, false, nullptr);
      });
      std::vector<int32_t> ids(tokens * s.per_token);
      check(cudaMemcpy(ids.data(), scratch.ids, ids.size() * 4, cudaMemcpyDeviceToHost), "copy of the choice");
      const double experts = static_cast<double>(std::set<int32_t>(ids.begin(), ids.end()).size());
      const double read = experts * 3 * s.hidden * s.inter * 2;
      const double flops = 2.0 * 3 * s.hidden * s.inter * static_cast<double>(ids.size());
      std::printf("%6lld %9s %8.0f %9.2f %9.0f %6.1f%% %9.1f |", static_cast<long long>(tokens), name, experts, us,
                  read / us * 1e-3, read / us * 1e-1 / bandwidth, flops / us * 1e-6);
      if (kernel == ExpertKernel::kAuto) {
        std::printf("\n");
        continue;
      }
      const cuda::ExpertLaunch by{kernel, processors};
      const int times = tokens > 1024 ? 10 : 32, tile_rows = cuda::rows_of(kernel);
      const cuda::Product routing{
          {tokens, s.experts, s.hidden, s.hidden, s.experts}, x.data(), router.data(), nullptr, scratch.logits};
      const auto time = [&](auto&& fn) { std::printf(" %.1f", microseconds(times, fn)); };
      time([&](int) { gemm.run(routing, nullptr); });
      time([&](int) { cuda::choose_experts(s, scratch, tokens, nullptr); });
      time([&](int) { cuda::sort_by_expert(s, scratch, tokens, tile_rows, nullptr); });
      time([&](int i) { cuda::expert_gate_up(s, scratch, at(i), w13.data(), tokens, by, nullptr); });
      time([&](int) { cuda::expert_down(s, scratch, w2.data(), tokens, false, by, nullptr); });
      time([&](int) { cuda::combine_experts(s, scratch, y.data(), tokens, false, nullptr); });
      std::printf("\n");
    }
  }
}

int run(int argc, char** argv) {
  const Options options = parse(argc, argv);
  Buffer<uint8_t> workspace(kWorkspace);
  Gemm gemm(workspace.data(), kWorkspace);
  std::printf("%s\n", gemm.library().c_str());
  if (options.bench) {
    run_bench(gemm);
    return 0;
  }
  run_cases(gemm, options);
  check_padding(gemm, options);
  check_gathers(gemm, options);
  if (!options.quick) check_order(options);
  check_refusals(gemm);
  return finish("moe_test");
}

}  // namespace
}  // namespace refit::test

int main(int argc, char** argv) {
  try {
    return refit::test::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "moe_test: %s\n", error.what());
    return 1;
  }
}
