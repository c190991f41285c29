// Steps of a Qwen3-8B shape with LoRA adapters beside the same steps without: decode with a context of 1,024 tokens,
// and a prefill.   adapters_bench [--layers N] [--rank R] [--turns N] [--only TOKENS]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "bench_gpu/model_step.h"

using namespace refit;
using namespace refit::bench;

namespace {

constexpr int kSlots = 32, kContext = 1024, kPrefill = 4096, kMostSequences = 256;

struct Options {
  int layers = 36, rank = 32, turns = 15, only = 0;
};

CoreConfig config(const Options& o) {
  CoreConfig c = model_config(kQwen3_8b, o.layers);
  add_adapters(c, kQwen3_8b.inter, kSlots, o.rank);
  c.pages = kMostSequences * (kContext + kPageSize) / kPageSize;
  c.max_step_tokens = kPrefill, c.max_step_sequences = kMostSequences, c.max_context = kContext + kPageSize;
  return c;
}

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
    Engine engine(config(o));
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
