// The CUDA device as the engine uses it: refused configurations, released and resumed memory, a GPU that is lost during
// a step. Steps and writes have tests of their own. Arguments: [--quick] [seed].
#include "cuda/device/device.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "core/memory_error.h"
#include "cuda/device/check.h"
#include "cuda/device/memory.h"
#include "test/check.h"
#include "test/gpu/device_model.h"
#include "test/steps/steps_under_way.h"

using namespace refit;
using namespace refit::test;
using cuda::check;
using cuda::CudaDevice;

namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kAll = kTagWeights | kTagKvCache | kTagCudaGraph;
bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

void write_model(Device& device, const TestModel& model, const CoreConfig& config) {
  Shards(model, config).write(device, {});
}

std::vector<uint8_t> all_bytes(Device& device, const CoreConfig& config) {
  std::vector<uint8_t> bytes;
  for (int rank = 0; rank < config.ranks; rank++) {
    for (size_t p = 0; p < config.params.size(); p++) {
      const Param& param = config.params[p];
      const size_t at = bytes.size();
      bytes.resize(at + static_cast<size_t>(param.rows * param.cols) * 2);
      device.read(rank, static_cast<int>(p), 0, 0, param.rows, param.cols, bytes.data() + at);
    }
  }
  return bytes;
}

template <typename E, typename F>
std::string message_of(F&& fn) {
  try {
    fn();
  } catch (const E& e) {
    return e.what();
  } catch (const std::exception& e) {
    return std::string("(another exception) ") + e.what();
  }
  return "(no exception)";
}

void test_refused(const TestModel& model) {
  const auto expect = [](const std::string& message, std::initializer_list<const char*> parts) {
    for (const char* part : parts) CHECKF(has(message, part), "\"%s\" misses \"%s\"", message.c_str(), part);
  };
  const auto refuse = [&](auto change) {
    CoreConfig config = config_of(model, 1);
    change(config);
    return message_of<std::invalid_argument>([&] { CudaDevice device(config); });
  };
  const std::string only = name_of(cuda::kElementType) + std::string(" only");
  expect(refuse([](CoreConfig& c) { c.dtype = DType::kFloat32; }), {"float32", only.c_str()});
  const auto other = [](CoreConfig& c) { c.dtype = cuda::of_element(DType::kFloat16, DType::kBFloat16); };
  expect(refuse(other), {name_of(cuda::of_element(DType::kFloat16, DType::kBFloat16)), only.c_str()});
  expect(refuse([](CoreConfig& c) { c.gpus = {99}; }), {"there is no GPU 99"});
  expect(refuse([](CoreConfig& c) { c.gpus = {0, 0}; }), {"one GPU for each of 1 ranks, got 2"});
  expect(refuse([](CoreConfig& c) { c.pages = 0; }), {"KV pages"});
  expect(refuse([](CoreConfig& c) { c.ranks = 3; }), {"do not divide"});
  expect(refuse([](CoreConfig& c) { c.ranks = 16; }), {"ranks"});
  expect(refuse([](CoreConfig& c) { c.params.pop_back(); }), {"missing"});
  expect(refuse([](CoreConfig& c) { c.ranks = 2, c.gpus = {0, 0}, c.share_gpus = false; }), {""});
  CoreConfig shared = config_of(model, 2);
  shared.share_gpus = false;
  unsetenv("REFIT_CUDA_SHARE_CARD");
  expect(message_of<std::invalid_argument>([&] { CudaDevice device(shared); }), {"several ranks"});
  CoreConfig large = config_of(model, 1);
  large.pages = 12000000;
  expect(message_of<NoMemory>([&] { CudaDevice device(large); }),
         {"GPU 0 is too full", "rank 0 (GPU-", "KV cache", "nvidia-smi"});
}

void test_memory(const Variant& variant, int ranks, unsigned seed) {
  const TestModel model(variant, cuda::kElementType, seed);
  const CoreConfig config = config_of(model, ranks);
  CudaDevice device(config);
  const auto info = device.info();
  const CudaMemoryPlan plan = cuda::plan_memory(config);
  CHECKF(
      info.weight_bytes == plan.weight_bytes * ranks && info.kv_bytes == plan.kv_bytes * ranks && has(info.isa, "sm_"),
      "%s", info.isa.c_str());
  for (const uint8_t byte : all_bytes(device, config)) {
    if (byte != 0) {
      CHECKF(false, "%s: weights of a new device are not zero", variant.name);
      break;
    }
  }
  std::vector<const void*> addresses;
  for (int rank = 0; rank < ranks; rank++) {
    for (size_t p = 0; p < config.params.size(); p++) addresses.push_back(device.address(rank, static_cast<int>(p)));
  }
  const auto moved = [&] {
    size_t at = 0, count = 0;
    for (int rank = 0; rank < ranks; rank++) {
      for (size_t p = 0; p < config.params.size(); p++) {
        count += device.address(rank, static_cast<int>(p)) != addresses[at++];
      }
    }
    return count;
  };
  write_model(device, model, config);
  const std::vector<uint8_t> bytes = all_bytes(device, config);
  const BatchBuilder batch = prompt(model, seed);
  const StepResult first = batch.run(device);
  CHECK(first.tokens.size() == 100);
  const auto same_step = [&](const char* when) {
    const StepResult again = batch.run(device);
    CHECKF(again.tokens == first.tokens && again.logprobs == first.logprobs && again.top_logprobs == first.top_logprobs,
           "%s, %d ranks: a step has other bits %s", variant.name, ranks, when);
  };

  for (int round = 0; round < 3; round++) {
    // With a copy in host memory.
    const uint64_t given = device.release_memory(kAll, true);
    CHECKF(given >= (plan.weight_bytes + plan.kv_bytes + plan.scratch_bytes) * ranks / 100 * 99,
           "%lu bytes were given back", static_cast<unsigned long>(given));
    CHECK(device.release_memory(kAll, false) == 0);
    CHECK(has(message_of<std::runtime_error>([&] { batch.run(device); }), "weights is released"));
    CHECK(has(message_of<std::runtime_error>([&] { all_bytes(device, config); }), "weights is released"));
    CHECK_THROWS(device.scramble(1), std::runtime_error);
    CHECK_THROWS(device.checksum({}, {}), std::runtime_error);
    CHECK(!device.resume_memory(kTagKvCache));
    CHECK(has(message_of<std::runtime_error>([&] { batch.run(device); }), "weights is released"));
    CHECK(device.resume_memory(kTagWeights));
    CHECK(has(message_of<std::runtime_error>([&] { batch.run(device); }), "cuda_graph"));
    CHECK(device.resume_memory(kAll));
    CHECKF(all_bytes(device, config) == bytes, "%s: kept weights came back with other bytes", variant.name);
    CHECK(moved() == 0);
    same_step("after weights were kept");
    // Without a copy: zeros until they are written again.
    device.release_memory(kTagWeights, false);
    CHECK(!device.resume_memory(kTagWeights));
    const std::vector<uint8_t> empty = all_bytes(device, config);
    CHECKF(std::all_of(empty.begin(), empty.end(), [](uint8_t b) { return b == 0; }),
           "%s: weights that were given up are not zero", variant.name);
    write_model(device, model, config);
    same_step("after weights were written again");
  }
  size_t flat = 0, total = 0;
  for (int round = 0; round < 20; round++) {
    device.release_memory(kAll, round % 2 == 0);
    size_t free = 0;
    check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    if (round == 2) flat = free;
    CHECKF(round < 3 || free == flat, "round %d: %zu bytes free, %zu before", round, free, flat);
    device.resume_memory(kAll);
    write_model(device, model, config);
    same_step("after rounds of release and resume");
  }
}

void test_steps_under_way(const Variant& variant, int ranks) {
  const TestModel model(variant, cuda::kElementType, 1);
  for (const bool graphs : {true, false}) {
    CoreConfig config = config_of(model, ranks);
    config.graphs = graphs;
    CudaDevice device(config);
    write_model(device, model, config);
    check_steps_under_way(
        device, model, kPageSize,
        std::string(variant.name) + ", " + std::to_string(ranks) + " ranks" + (graphs ? "" : ", no graphs"));
  }
}

// A new device gets the memory of the one before.
void test_nothing_is_left(const TestModel& model) {
  size_t flat = 0, free = 0, total = 0;
  for (int round = 0; round < 6; round++) {
    {
      CudaDevice device(config_of(model, 1));
      write_model(device, model, config_of(model, 1));
      prompt(model, 1).run(device);
    }
    check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    if (round == 1) flat = free;
    CHECKF(round < 2 || free + (4 << 20) >= flat, "round %d: %zu bytes free, %zu before", round, free, flat);
  }
}

// A GPU is lost in the third step. In a process of its own, which ends without destructors.
void lose(const char* fault, int ranks, double watchdog, const char* expected, double least, double most) {
  setenv("REFIT_CUDA_FAULT", fault, 1);
  const TestModel model(kDense, cuda::kElementType, 1);
  CoreConfig config = config_of(model, ranks);
  config.watchdog_seconds = watchdog;
  auto* const device = new CudaDevice(config);
  write_model(*device, model, config);
  const BatchBuilder batch = prompt(model, 1);
  batch.run(*device);
  batch.run(*device);
  const auto began = Clock::now();
  const std::string message = message_of<DeviceLost>([&] { batch.run(*device); });
  const double took = std::chrono::duration<double>(Clock::now() - began).count();
  std::printf("  %s: %s (after %.3f s)\n", fault, message.c_str(), took);
  CHECKF(has(message, expected) && has(message, "rank ") && has(message, " (GPU-") && has(message, "layers.0."),
         "%s: %s", fault, message.c_str());
  CHECKF(took >= least && took <= most, "%s: %f s", fault, took);
  // All other calls fail at once with the same message.
  CHECK(message_of<DeviceLost>([&] { batch.run(*device); }) == message);
  CHECK(message_of<DeviceLost>([&] { device->scramble(1); }) == message);
  CHECK(message_of<DeviceLost>([&] { device->release_memory(kAll, false); }) == message);
  delete device;  // returns, and leaves stuck threads alone
}

void in_child(const char* name, const std::function<void()>& fn) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    fn();
    std::fflush(nullptr);
    _exit(failures.load() == 0 ? 0 : 1);
  }
  const auto began = Clock::now();
  const auto seconds = [&] { return std::chrono::duration<double>(Clock::now() - began).count(); };
  int status = 0;
  while (waitpid(child, &status, WNOHANG) == 0) {
    if (seconds() > 90) kill(child, SIGKILL);
    usleep(10000);
  }
  CHECKF(WIFEXITED(status) && WEXITSTATUS(status) == 0, "%s: status %x after %.1f s", name, status, seconds());
}

}  // namespace

int main(int argc, char** argv) {
  bool quick = false;
  unsigned seed = 1;
  for (int i = 1; i < argc; i++) {
    if (std::strcmp(argv[i], "--quick") == 0) {
      quick = true;
    } else if (argv[i][0] != '-') {
      seed = static_cast<unsigned>(std::atoi(argv[i]));
    }
  }
  std::printf("seed %u\n", seed);
  if (!quick) {
    // Before the first CUDA call of this process.
    in_child("illegal", [] { lose("illegal:3", 1, 100, "cudaErrorIllegalAddress", 0, 1); });
    in_child("hang", [] { lose("hang:3:1", 2, 2, "has been stuck in", 2, 6); });
  }
  const TestModel model(kDense, cuda::kElementType, seed);
  test_refused(model);
  test_memory(kDense, 1, seed);
  test_steps_under_way(kDense, 1);
  if (!quick) {
    test_steps_under_way(kSparse, 1);
    test_steps_under_way(kDense, 2);
    test_steps_under_way(kSparse, 2);
    test_memory(kDense, 2, seed);
    test_memory(kSparse, 2, seed);
    test_nothing_is_left(model);
  }
  return finish("device_test");
}
