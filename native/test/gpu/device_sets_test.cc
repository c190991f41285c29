// Two sets of weights on a CUDA device: writes beside steps, copies between the sets, memory that one of them gives
// back, and steps with either. Arguments: [seed].
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "core/memory_error.h"
#include "cuda/device/device.h"
#include "cuda/device/memory.h"
#include "cuda/weights/pace.h"
#include "test/check.h"
#include "test/gpu/device_model.h"

using namespace refit;
using namespace refit::test;
using cuda::CudaDevice;

namespace {

constexpr uint32_t kAll = kTagWeights | kTagKvCache | kTagCudaGraph;
StepResult run(Device& device, const BatchBuilder& batch, int set) {
  StepBatch view = batch.view();
  view.set = set;
  StepResult result;
  device.step(view, result);
  return result;
}

bool same(const StepResult& a, const StepResult& b) {
  return a.tokens == b.tokens && a.logprobs == b.logprobs && a.top_logprobs == b.top_logprobs;
}

template <typename F>
std::string message_of(F&& fn) {
  try {
    fn();
  } catch (const std::exception& e) {
    return e.what();
  }
  return "(no exception)";
}

// A step with each set, of two models that one-set devices computed.
struct Expected {
  Expected(const TestModel& model, const BatchBuilder& batch, int ranks) {
    const CoreConfig config = config_of(model, ranks, 1);
    CudaDevice device(config);
    const Shards shards(model, config);
    shards.write(device, {});
    step = run(device, batch, 0);
    sums = shards.sums(device, {});
  }
  StepResult step;
  std::vector<uint64_t> sums;
};

void test_sets(const Variant& variant, int ranks, double rate, unsigned seed) {
  const std::string name = std::string(variant.name) + ", " + std::to_string(ranks) + " ranks, rate " +
                           std::to_string(static_cast<int>(rate));
  const TestModel a(variant, cuda::kElementType, seed), b(variant, cuda::kElementType, seed + 1);
  CoreConfig config = config_of(a, ranks, 2);
  config.shadow_rate = rate;
  const BatchBuilder batch = prompt(a, seed);
  const Expected of_a(a, batch, ranks), of_b(b, batch, ranks);
  CHECK(!same(of_a.step, of_b.step));
  CudaDevice device(config);
  const CudaMemoryPlan plan = cuda::plan_memory(config);
  CHECK(plan.spare_bytes > 0 && device.info().spare_bytes == plan.spare_bytes * ranks);
  for (int rank = 0; rank < ranks; rank++) {
    for (size_t p = 0; p < config.params.size(); p++)
      CHECK(device.address(rank, static_cast<int>(p), 0) != device.address(rank, static_cast<int>(p), 1));
  }
  const Shards shards_a(a, config), shards_b(b, config);
  const Access live{}, spare{.beside = true, .set = 1}, first{.beside = true, .set = 0};
  shards_a.write(device, live);
  const auto is = [&](int set, const Expected& expected, const char* when) {
    CHECKF(shards_a.sums(device, {.beside = true, .set = set}) == expected.sums, "%s: set %d has other bytes %s",
           name.c_str(), set, when);
    CHECKF(same(run(device, batch, set), expected.step), "%s: a step with set %d has other bits %s", name.c_str(), set,
           when);
  };
  shards_b.write(device, spare);
  is(0, of_a, "after a write of set 1"), is(1, of_b, "after a write of set 1");
  // Beside steps of the other set, by turns.
  for (int round = 0; round < 6; round++) {
    const int set = round % 2;
    const Access other{.beside = true, .set = 1 - set};
    std::atomic<bool> done = false;
    std::thread writer([&] {
      for (int i = 0; i < 3; i++) {
        (i == 1 ? shards_b : shards_a).write(device, other);
        shards_a.sums(device, other);
      }
      (set == 0 ? shards_b : shards_a).write(device, other);
      done = true;
    });
    int steps = 0;
    for (; !done || steps < 3; steps++) {
      CHECKF(same(run(device, batch, set), (set == 0 ? of_a : of_b).step), "%s: a step beside a write has other bits",
             name.c_str());
    }
    writer.join();
  }
  is(0, of_a, "after writes beside steps"), is(1, of_b, "after writes beside steps");
  // Copies: all, and a rectangle that leaves the rest alone.
  device.copy_weights(shards_a.job.rects, 0, 1);
  is(1, of_a, "after a copy");
  shards_b.write(device, spare);
  std::vector<Rect> some(shards_a.job.rects.begin(), shards_a.job.rects.begin() + 2);
  device.copy_weights(some, 0, 1);
  const auto mixed = shards_a.sums(device, spare);
  for (size_t i = 0; i < mixed.size(); i++) CHECK(mixed[i] == (i < 2 ? of_a : of_b).sums[i]);
  shards_b.write(device, spare);
  // The memory of one set, while steps run.
  for (int round = 0; round < 3; round++) {
    const int set = round % 2;
    const Expected& own = set == 0 ? of_a : of_b;
    const uint64_t bytes = device.drop_set(1 - set);
    CHECKF(bytes == plan.spare_bytes * ranks, "%s: %lu bytes", name.c_str(), static_cast<unsigned long>(bytes));
    CHECK(device.drop_set(1 - set) == 0);
    const std::string gone = "the memory of weight set " + std::to_string(1 - set) + " is released";
    CHECK(message_of([&] { run(device, batch, 1 - set); }).find(gone) != std::string::npos);
    CHECK(message_of([&] { shards_a.sums(device, {.beside = true, .set = 1 - set}); }).find(gone) != std::string::npos);
    is(set, own, "while the other has no memory");
    // Sleep without it: only what is there comes back.
    device.release_memory(kAll, round != 1);
    CHECK(device.resume_memory(kAll) == (round != 1));
    if (round == 1) (set == 0 ? shards_a : shards_b).write(device, {.beside = false, .set = set});
    is(set, own, "after a sleep without the other");
    CHECK(message_of([&] { run(device, batch, 1 - set); }).find(gone) != std::string::npos);
    device.restore_set(1 - set);
    const auto zeros = shards_a.sums(device, {.beside = true, .set = 1 - set});
    for (const uint64_t sum : zeros) CHECK(sum == 0);
    device.copy_weights(shards_a.job.rects, set, 1 - set);
    is(1 - set, own, "after it came back");
    (set == 0 ? shards_b : shards_a).write(device, {.beside = true, .set = 1 - set});
  }
  // Sleep with both.
  device.release_memory(kAll, true);
  CHECK(device.resume_memory(kAll));
  is(0, of_a, "after a sleep"), is(1, of_b, "after a sleep");
  device.scramble(seed, 1);
  is(0, of_a, "after noise in set 1");
  CHECK(!same(run(device, batch, 1), of_b.step));
  shards_a.write(device, first);
  is(0, of_a, "after a write beside steps of set 0");
  // The first step ever, while the set that steps begin with has no memory: its kernels are loaded with the other.
  CudaDevice fresh(config);
  shards_b.write(fresh, spare);
  fresh.drop_set(0);
  CHECKF(same(run(fresh, batch, 1), of_b.step), "%s: the first step with set 1 has other bits", name.c_str());
}

// Slices cover all copies once, in order, and are short; a refusal ends them.
void test_slices() {
  std::vector<cuda::Copy2d> copies;
  uint8_t source = 0;
  cuda::Element target;
  for (const auto& [rows, cols] : std::vector<std::pair<int64_t, int64_t>>{{1, 7}, {5, 20 << 20}, {4097, 4096}, {3, 1}})
    copies.push_back({&source, &target, rows, cols, 2 * cols + 6, 2, cols + 1, cuda::kElementType});
  cuda::Pace fast(1e15), none(0);
  std::vector<cuda::Copy2d> got;
  size_t slices = 0;
  CHECK(cuda::paced(copies, fast, [&](const std::vector<cuda::Copy2d>& slice) {
    int64_t bytes = 0;
    for (const auto& copy : slice) bytes += 2 * copy.rows * copy.cols;
    CHECK(bytes <= cuda::kSliceBytes || (slice.size() == 1 && slice[0].rows == 1));
    got.insert(got.end(), slice.begin(), slice.end());
    return ++slices > 0;
  }));
  CHECK(slices > 5);
  size_t at = 0;
  for (const auto& copy : copies) {
    for (int64_t row = 0; row < copy.rows; at++) {
      if (!CHECK(at < got.size() && got[at].cols == copy.cols)) return;
      CHECK(got[at].src == static_cast<const uint8_t*>(copy.src) + row * copy.src_row_bytes);
      CHECK(got[at].dst == copy.dst + row * copy.dst_cols);
      row += got[at].rows;
    }
  }
  CHECK(at == got.size());
  int calls = 0;
  CHECK(!cuda::paced(copies, fast, [&](const auto&) { return ++calls < 2; }) && calls == 2);
  CHECK(cuda::paced(copies, none, [&](const auto& all) { return all.size() == copies.size(); }));
}

}  // namespace

int main(int argc, char** argv) {
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);  // ranks on one GPU must not share a queue
  const unsigned seed = argc > 1 ? static_cast<unsigned>(std::atoi(argv[1])) : 1;
  test_slices();
  test_sets(kDense, 1, 0, seed);
  test_sets(kDense, 1, 1e8, seed);  // some 2 MB a set
  test_sets(kDense, 2, 0, seed);
  test_sets(kSparse, 2, 0, seed);
  return finish("device_sets_test");
}
