// Groups of whole engines on GPUs: refusals, parameters from engine to engine, and whether a group still works. For
// group_test.cc.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "cuda/device/device.h"
#include "cuda/device/uuid.h"
#include "cuda/group/group.h"
#include "cuda/group/group_library.h"
#include "test/check.h"
#include "test/forward_reference.h"
#include "test/gpu/group/group_engine.cuh"

using namespace refit;
using namespace refit::cuda;
using namespace refit::group_test;

namespace {

CoreConfig config_of(const test::TestModel& model, std::vector<int> gpus) {
  CoreConfig config = model.config(static_cast<int>(gpus.size()), 2, "", 64, 16);
  config.device = "cuda";
  config.gpus = std::move(gpus);
  config.share_gpus = true;
  config.max_step_tokens = 128;
  config.max_step_sequences = 4;
  config.max_context = 128;
  return config;
}

const test::Variant kVariant{"qwen3", 128, 3, 4, 2, 64, 256, 321, false, false, true, true};

void refused(Device& device, const NcclGroupOptions& options, const char* part,
             GroupErrorKind kind = GroupErrorKind::kRefused) {
  try {
    device.nccl_group(options);
    CHECKF(false, "not refused: %s", part);
  } catch (const GroupError& error) {
    CHECKF(error.kind == kind && has(error.what(), part), "%s", error.what());
  }
}

// The tests that need only one GPU.
void test_single_gpu() {
  const test::TestModel model(kVariant, DType::kBFloat16, 3);
  {
    CudaDevice device(config_of(model, {0, 0}));
    refused(device, {3, 1}, "rank 1 and rank 0 share GPU-", GroupErrorKind::kSharedGpu);
  }
  CudaDevice device(config_of(model, {0}));
  cudaDeviceProp prop;
  check(cudaGetDeviceProperties(&prop, 0), "cudaGetDeviceProperties");
  NcclGroupOptions options{2, 1};
  options.peer_gpus = {uuid_text(prop.uuid).substr(4)};
  refused(device, options, "the trainer share GPU-", GroupErrorKind::kSharedGpu);
  refused(device, {1, 1}, "do not fit into a group of 1");
  options = {2, 1};
  options.library = "/nowhere/libnccl.so.2";
  refused(device, options, "/nowhere/libnccl.so.2");
  // Alone: communicators, slots, barriers.
  const auto id = nccl_group_id("");
  auto group = device.nccl_group({1, 0});
  std::printf("%s with %s\n", group->describe().c_str(), group->library().c_str());
  group->connect(id.data(), in(kPatience));
  group->barrier(in(kPatience));
  group->stage(1000001);
  CHECK(group->staged(1).source.rank_data.size() == 1);
  try {
    group->stage(uint64_t{1} << 44);
    CHECK(!"16 TB were staged");
  } catch (const std::bad_alloc& error) {
    CHECKF(has(error.what(), "process group"), "%s", error.what());
  }
  CHECK_THROWS(group->staged(0), std::invalid_argument);
  group->end();
  group.reset();
  // A trainer on the same GPU: NCCL reports it when both have joined.
  Trainer trainer;
  const std::string met = trainer.request(command('I'));
  trainer.send(join(met, 2, 0, 0));
  group = device.nccl_group({2, 1});
  const auto began = Clock::now();
  try {
    group->connect(id_of(met).data(), in(20));
    CHECK(!"two ranks on one GPU were let in");
  } catch (const GroupError& error) {
    std::printf("one GPU twice: %.0f ms, %s\n", since(began) * 1e3, error.what());
    CHECKF(error.kind == GroupErrorKind::kSharedGpu, "%s", error.what());
  }
  group->end();
  // The other rank never joins.
  group = device.nccl_group({2, 1});
  const auto waiting = Clock::now();
  try {
    group->connect(nccl_group_id("").data(), in(2));
    CHECK(!"a group of two was joined by one");
  } catch (const GroupError& error) {
    CHECKF(error.kind == GroupErrorKind::kTimeout, "%s", error.what());
    std::printf("no rank joined: %s\n", error.what());
  }
  CHECKF(since(waiting) < 15, "%.1f s", since(waiting));
}

std::vector<uint8_t> all_bytes(Device& device, const CoreConfig& config, int rank) {
  std::vector<uint8_t> bytes;
  for (size_t p = 0; p < config.params.size(); p++) {
    const Param& param = config.params[p];
    const size_t at = bytes.size();
    bytes.resize(at + static_cast<size_t>(param.rows * param.cols) * 2);
    device.read(rank, static_cast<int>(p), 0, 0, param.rows, param.cols, bytes.data() + at);
  }
  return bytes;
}

// From engine to engine, a group for each tensor-parallel rank.
void test_params(int ranks) {
  const test::TestModel model(kVariant, DType::kBFloat16, 5);
  std::vector<int> first, second;
  for (int r = 0; r < ranks; r++) first.push_back(r), second.push_back(ranks + r);
  const CoreConfig here = config_of(model, first), there = config_of(model, second);
  CudaDevice sender(here), receiver(there);
  sender.scramble(11);
  receiver.scramble(12);
  std::vector<std::vector<uint8_t>> ids;
  for (int r = 0; r < ranks; r++) ids.push_back(nccl_group_id(""));
  std::vector<std::thread> threads;
  for (const int side : {0, 1}) {
    for (int r = 0; r < ranks; r++) {
      threads.emplace_back([&, side, r] {
        NcclGroupOptions options{2, side};
        options.core_rank = r;
        try {
          Device& device = side == 0 ? sender : receiver;
          auto group = device.nccl_group(options);
          group->connect(ids[static_cast<size_t>(r)].data(), in(kPatience));
          group->barrier(in(kPatience));
          group->params(device, side == 0 ? here : there, r, 0, 0, in(kPatience));
          group->end();
        } catch (const std::exception& error) {
          CHECKF(false, "parameters, side %d, rank %d: %s", side, r, error.what());
        }
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
  for (int r = 0; r < ranks; r++) {
    const auto sent = all_bytes(sender, here, r);
    CHECKF(sent == all_bytes(receiver, there, r), "parameters of rank %d of %d differ", r, ranks);
    CHECK(sent.size() > 100000);
  }
  std::printf("parameters: tp %d to tp %d\n", ranks, ranks);
}

// The group works, and it receives the right bytes.
void test_works(Engine& engine, uint64_t seed, const char* after) {
  Trainer trainer;
  auto group = meet(engine, {&trainer});
  group->stage(1 << 20);
  trainer.send(command('B', seed), {1000001});
  group->receive(0, {{512, 1000001}}, 0, in(kPatience));
  trainer.reply();
  check_slot(engine, *group, 0, {{512, 1000001}}, seed, after);
}

std::string failure_of(const std::function<void()>& fn, double within, const char* what) {
  const auto began = Clock::now();
  std::string message = "(no exception)";
  try {
    fn();
    CHECKF(false, "%s: no exception", what);
  } catch (const GroupError& error) {
    message = error.what();
  } catch (const std::exception& error) {
    CHECKF(false, "%s: another exception: %s", what, error.what());
  }
  std::printf("%s: %.2f s, %s\n", what, since(began), message.c_str());
  CHECKF(since(began) < within, "%s: %.1f s", what, since(began));
  return message;
}

}  // namespace
