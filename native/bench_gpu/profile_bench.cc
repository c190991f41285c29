// The time of each kernel of a step, and the gaps between kernels, by CUPTI's records: decode and prefill of the shapes
// of Qwen3-8B, Qwen3-30B-A3B and Qwen2.5-1.5B.
//   profile_bench [--model 8b|30b|1.5b] [--only decode|prefill] [--tokens N]... [--layers N] [--context N]
//                 [--graphs on|off] [--deterministic on|off] [--adapters N]...
//     --layers   the first N layers of each model (8), at most all
//     --tokens   instead of the model's list: decode of N sequences, or above 1,024 prefill of N tokens in sequences of
//                at most 4,096 (--only decides for all N)
//     --context  tokens of a decoded sequence with the new one (256)
//     --graphs   off: kernels of decode are launched one by one (on)
//     --deterministic  on: results that do not depend on the batch (off)
//     --adapters each step of a model without experts also with so many adapters of rank 32 on all linears
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench_gpu/cupti_trace.h"
#include "bench_gpu/model_step.h"
#include "bench_gpu/step_profile.h"

using namespace refit;
using namespace refit::bench;

namespace {

constexpr int kWarmUps = 5, kTimed = 11, kProfiled = 5, kMostOfPrompt = 4096, kMostDecoded = 1024, kRank = 32;

struct Model {
  ModelShape shape;
  std::vector<int> decode, prefill;
};
const Model kModels[] = {{kQwen3_8b, {1, 64, 256, 512}, {4096, 8192}},
                         {kQwen3_30b, {1, 16, 64, 256, 512}, {4096, 8192}},
                         {kQwen25_1_5b, {1, 64, 256}, {}}};

struct Options {
  std::string model, only;
  int layers = 8, context = 256;
  bool graphs = true, deterministic = false;
  std::vector<int> tokens, adapters;
};

struct Case {
  std::string title;
  int sequences, each, before, adapters = 0;
  double host_ms = 0;  // without CUPTI
};

std::vector<Case> cases_of(const Model& model, const Options& o) {
  std::vector<Case> cases;
  const std::string name = model.shape.name;
  const auto add = [&](const Case& one) {
    cases.push_back(one);
    for (const int n : o.adapters) {
      if (model.shape.experts > 0) break;
      cases.push_back(one);
      cases.back().title += ", " + std::to_string(n) + (n == 1 ? " adapter" : " adapters");
      cases.back().adapters = n;
    }
  };
  const auto decode = [&](int tokens) {
    add({name + ": decode of " + std::to_string(tokens), tokens, 1, o.context - 1});
  };
  const auto prefill = [&](int tokens) {
    const int sequences = (tokens + kMostOfPrompt - 1) / kMostOfPrompt, each = tokens / sequences;
    add({name + ": prefill of " + std::to_string(sequences) + " x " + std::to_string(each), sequences, each, 0});
  };
  for (const int n : o.tokens) {
    if (o.only.empty() ? n <= kMostDecoded : o.only == "decode") {
      decode(n);
    } else {
      prefill(n);
    }
  }
  if (!o.tokens.empty()) return cases;
  for (const int n : model.decode) {
    if (o.only != "prefill") decode(n);
  }
  for (const int n : model.prefill) {
    if (o.only != "decode") prefill(n);
  }
  return cases;
}

CoreConfig config(const ModelShape& shape, int layers, const Options& o, const std::vector<Case>& cases) {
  CoreConfig c = model_config(shape, layers);
  c.graphs = o.graphs;
  c.deterministic = o.deterministic;
  int slots = 0;
  for (const Case& one : cases) slots = std::max(slots, one.adapters);
  if (slots > 0) add_adapters(c, shape.inter, slots, kRank);
  for (const Case& one : cases) {
    c.pages = std::max(c.pages, one.sequences * pages_of(one.before + one.each));
    c.max_step_tokens = std::max(c.max_step_tokens, one.sequences * one.each);
    c.max_step_sequences = std::max(c.max_step_sequences, one.sequences);
    c.max_context = std::max(c.max_context, one.before + one.each);
  }
  return c;
}

Step step_of(const Case& one) { return Step(one.sequences, one.each, one.before, one.adapters, 1.0f); }

double median_ms(Engine& engine, Step& step) {
  for (int i = 0; i < kWarmUps; ++i) step.run(engine.forward());
  std::vector<Contestant> all{{"step", [&](cudaStream_t) { step.run(engine.forward()); }, {}}};
  take_turns_by_clock(all, kTimed);
  return all[0].median();
}

// How evenly the tokens choose their experts: the time of a sparse layer depends on it.
void print_experts(Engine& engine, Step& step) {
  const ModelRecipe& m = engine.config().recipe;
  const std::vector<uint16_t> experts = engine.experts(step);
  const size_t each = static_cast<size_t>(m.experts_per_token), layers = static_cast<size_t>(m.layers);
  std::vector<std::vector<int>> tokens(layers, std::vector<int>(static_cast<size_t>(m.experts)));
  for (size_t i = 0; i < experts.size(); ++i) ++tokens[i / each % layers][experts[i]];
  double used = 0, most = 0;
  for (const std::vector<int>& layer : tokens) {
    used += static_cast<double>(layer.size() - static_cast<size_t>(std::count(layer.begin(), layer.end(), 0)));
    most += *std::max_element(layer.begin(), layer.end());
  }
  const double mean = static_cast<double>(experts.size()) / static_cast<double>(layers) / m.experts;
  std::printf("Experts in use: %.1f of %d in a layer; the busiest has %.1f tokens, the mean is %.1f.\n\n",
              used / static_cast<double>(layers), m.experts, most / static_cast<double>(layers), mean);
}

// Kernels that run at least once in each layer are scaled to all layers of the model, the others are not.
void print_all_layers(const StepProfile& profile, const Case& one, int layers, int all) {
  double launches = 0, us = 0, alone = 0;
  for (const auto& [name, row] : profile.rows()) {
    if (!row.is_kernel) continue;
    const double in_layers = std::floor(row.launches / layers) * layers;
    const double scaled = in_layers * all / layers + row.launches - in_layers, factor = scaled / row.launches;
    launches += scaled, us += row.us * factor, alone += row.alone * factor;
  }
  const StepProfile::Row kernels = profile.kernels();
  const double gaps = profile.gaps() * launches / kernels.launches;
  const double host_ms = one.host_ms + (alone - kernels.alone + gaps - profile.gaps()) / 1e3;
  std::printf("Scaled to %d layers: about %.3f ms; %.0f launches, kernels %.1f us, busy %.1f us, gaps %.1f us.\n\n",
              all, host_ms, launches, us, alone, gaps);
}

void print_profile(const StepProfile& profile, const Case& one, double traced_ms, int layers, int all) {
  std::printf("| kernel | launches | us | us alone | us a layer | share of the step |\n");
  std::printf("| --- | ---: | ---: | ---: | ---: | ---: |\n");
  for (const auto& [name, row] : profile.rows()) {
    char a_layer[32] = "";
    if (row.is_kernel && row.launches >= layers) std::snprintf(a_layer, sizeof(a_layer), "%.2f", row.us / layers);
    std::printf("| `%s` | %.4g | %.1f | %.1f | %s | %.1f %% |\n", short_name(name).c_str(), row.launches, row.us,
                row.alone, a_layer, row.alone / one.host_ms / 10);
  }
  const StepProfile::Row kernels = profile.kernels();
  std::printf("\nStep %.3f ms on the host (%.3f ms with CUPTI); %.4g launches, kernels %.1f us, busy %.1f us",
              one.host_ms, traced_ms, kernels.launches, kernels.us, kernels.alone);
  if (kernels.us - kernels.alone > 0.05) std::printf(" (kernels overlap by %.1f us)", kernels.us - kernels.alone);
  std::printf(", gaps %.1f us (%.2f us a launch).\n", profile.gaps(), profile.gaps() / kernels.launches);
  if (!profile.is_even()) std::printf("!!!!! The steps had different numbers of launches: records are missing.\n");
  std::printf("\n");
  if (layers < all) print_all_layers(profile, one, layers, all);
  std::fflush(stdout);
}

void profile(Engine& engine, CuptiTrace& trace, const Case& one, int all) {
  Step step = step_of(one);
  const int layers = engine.config().recipe.layers;
  std::printf("### %s\n\n", one.title.c_str());
  if (engine.config().recipe.experts > 0) print_experts(engine, step);
  const double traced_ms = median_ms(engine, step);
  cuda::check(cudaDeviceSynchronize(), "warm up");
  trace.take();
  StepProfile profile;
  for (int i = 0; i < kProfiled; ++i) {
    step.run(engine.forward());
    cuda::check(cudaDeviceSynchronize(), "a step");
    profile.add(trace.take());
  }
  if (profile.kernels().launches == 0) throw std::runtime_error("CUPTI recorded no kernels");
  print_profile(profile, one, traced_ms, layers, all);
}

int run_model(const Model& model, const Options& o, bool first) {
  try {
    std::vector<Case> cases = cases_of(model, o);
    CuptiTrace trace;
    if (first) print_gpu(0);
    const int all = model.shape.layers, layers = std::min(o.layers, all);
    std::printf("\n%s's shape, %d of %d layers; decode with contexts of %d tokens; the mean of %d steps\n\n",
                model.shape.title, layers, all, o.context, kProfiled);
    Engine engine(config(model.shape, layers, o, cases));
    for (Case& one : cases) {
      Step step = step_of(one);
      one.host_ms = median_ms(engine, step);
    }
    trace.start();
    for (const Case& one : cases) profile(engine, trace, one, all);
    return 0;
  } catch (const std::exception& error) {
    std::fflush(stdout);
    std::fprintf(stderr, "profile_bench: %s\n", error.what());
    return 1;
  }
}

// In a process of its own, because CUPTI stays in one that has used it and would slow the next model's steps.
int run_apart(const Model& model, const Options& o, bool first) {
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    const int code = run_model(model, o, first);
    std::fflush(stdout);
    _exit(code);
  }
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child) {
    std::perror("profile_bench");
    return 1;
  }
  if (WIFSIGNALED(status)) std::fprintf(stderr, "profile_bench: ended by signal %d\n", WTERMSIG(status));
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

Options parse(int argc, char** argv) {
  Options o;
  const auto number = [](const std::string& text) {
    const int value = std::atoi(text.c_str());
    if (value < 1) throw std::invalid_argument("\"" + text + "\" is no positive number");
    return value;
  };
  for (int i = 1; i < argc; i += 2) {
    const std::string flag = argv[i], value = i + 1 < argc ? argv[i + 1] : "";
    if (flag == "--model") {
      o.model = value;
    } else if (flag == "--only" && (value == "decode" || value == "prefill")) {
      o.only = value;
    } else if (flag == "--layers") {
      o.layers = number(value);
    } else if (flag == "--tokens") {
      o.tokens.push_back(number(value));
    } else if (flag == "--graphs" && (value == "on" || value == "off")) {
      o.graphs = value == "on";
    } else if (flag == "--deterministic" && (value == "on" || value == "off")) {
      o.deterministic = value == "on";
    } else if (flag == "--adapters") {
      o.adapters.push_back(number(value));
    } else if (flag == "--context") {
      o.context = number(value);
    } else {
      throw std::invalid_argument("unknown option " + flag + " " + value);
    }
  }
  return o;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Options o = parse(argc, argv);
    bool first = true;
    for (const Model& model : kModels) {
      if ((!o.model.empty() && o.model != model.shape.name) || cases_of(model, o).empty()) continue;
      if (run_apart(model, o, first) != 0) return 1;
      first = false;
    }
    if (first) throw std::invalid_argument("no model has this name (8b, 30b, 1.5b) and such a step");
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "profile_bench: %s\n", error.what());
    return 1;
  }
}
