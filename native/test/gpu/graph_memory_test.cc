// The memory of graphs of decode steps on a GPU is at most what ForwardSizes counts for them.
#include <sys/wait.h>
#include <unistd.h>

#include "cuda/forward/step_graphs.h"
#include "test/gpu/forward_gpus.cuh"

namespace {

const std::vector<Variant> kVariants = {
    {"dense", 64, 36, 4, 2, 16, 96, 101, false, false, false, false},
    {"dense, norms of projections", 64, 32, 4, 2, 16, 96, 101, true, false, true, false, 0, 0, 0, true, {}, 1.0, true},
    {"experts", 64, 24, 4, 2, 16, 96, 101, false, false, true, false, 8, 2, 32, true, std::vector<uint8_t>(24, 1)},
};
constexpr int kAllPages = 600;

size_t free_bytes() {
  size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return free;
}

// Sizes of decode steps that have graphs of their own.
std::vector<int> sizes() {
  std::vector<int> out = {1, 2, 4};
  for (int n = 8; n <= 256; n += 8) out.push_back(n);
  for (int n = 272; n <= 512; n += 16) out.push_back(n);
  return out;
}

void decode(Gpus& gpu, int count, int slots) {
  BatchBuilder b;
  std::vector<int32_t> adapters;
  for (int i = 0; i < count; ++i) {
    b.sequence({i % 50}, 0, {i});
    b.row({.token = i, .temperature = 0});
    if (slots > 0) adapters.push_back(i % slots);
  }
  gpu.step(b, false, adapters);
}

void test_memory(const Variant& v, bool adapted, const std::vector<int>& gpus) {
  constexpr int kSlots = 2, kSets = 2;
  const TestModel model(v, cuda::kElementType, 1);
  const SlotAdapters adapters(model, kSlots, 16, 1);
  const auto ranks = static_cast<int>(gpus.size());
  CoreConfig config = model.config(ranks, 1, "", kAllPages, kPageSize);
  config.sets = kSets;
  if (adapted) adapters.extend(config);
  Gpus gpu(model, gpus, nullptr, adapted ? &adapters : nullptr, kAllPages, true, kSets);
  for (const int count : sizes()) decode(gpu, count, adapted ? kSlots : 0);
  const size_t before = free_bytes();
  for (const int count : sizes()) decode(gpu, count, adapted ? kSlots : 0);
  const size_t after = free_bytes(), graphs = gpu.forward().graphs();
  CHECKF(graphs == sizes().size() * kSets * gpus.size(), "%s: %zu graphs", v.name, graphs);
  const double used = before > after ? static_cast<double>(before - after) : 0;
  const auto counted = static_cast<double>(cuda::forward_sizes(config).graphs) * static_cast<double>(graphs) /
                       (cuda::StepGraphs::kMost * kSets);
  CHECKF(used <= counted, "%s: %.1f MB of graphs, but %.1f MB are counted", v.name, used / 1e6, counted / 1e6);
  std::printf("%-28s %d ranks%s: %zu graphs take %.1f MB, %.1f KB for a layer; %.1f MB are counted\n", v.name, ranks,
              adapted ? ", adapters" : "", graphs, used / 1e6, used / 1e3 / static_cast<double>(graphs) / v.layers,
              counted / 1e6);
}

}  // namespace

// The driver keeps the memory of graphs that were destroyed, so each case has a process of its own.
int main() {
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  int failures = 0;
  for (const Variant& v : kVariants) {
    for (const bool adapted : {false, true}) {
      for (const auto& gpus : {std::vector<int>{0}, {0, 0}}) {
        const pid_t child = fork();
        if (child == 0) {
          test_memory(v, adapted, gpus);
          std::exit(finish("graph_memory_test"));
        }
        int status = 0;
        failures += child < 0 || waitpid(child, &status, 0) != child || status != 0;
      }
    }
  }
  CHECKF(failures == 0, "%d of the cases failed", failures);
  return finish("graph_memory_test, all cases");
}
