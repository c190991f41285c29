// Ranks that exchange through NCCL: sums and logits of ragged sizes against sums on the host, all calls of a
// communicator, and a peer that never comes, hangs or leaves, which must end in an error in time. Most of it needs two
// GPUs. Arguments: [--quick] (nothing with NCCL, for compute-sanitizer, which would check NCCL's kernels) [seed].
#include <dirent.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/device.h"
#include "cuda/device/check.h"
#include "cuda/exchange/all_reduce.h"
#include "cuda/exchange/exchange.h"
#include "cuda/exchange/peers.h"
#include "test/check.h"
#include "test/forward_reference.h"
#include "test/gpu/nccl_world.cuh"

namespace refit::cuda {
namespace {

// Only the kernel, on one GPU.
void test_sum_parts(unsigned seed) {
  std::mt19937 rng(seed);
  for (int ranks = 1; ranks <= kMaxRanks; ++ranks) {
    for (int round = 0; round < 8; ++round) {
      const int64_t count = round == 0 ? 1 : 1 + static_cast<int64_t>(rng() % (round < 6 ? 5000 : 300000));
      const int64_t room = (count + 7) / 8 * 8;
      std::vector<std::unique_ptr<Memory<Element>>> parts;
      SumParts given;
      for (int r = 0; r < ranks; ++r) {
        parts.push_back(std::make_unique<Memory<Element>>(room));
        const auto bits = part_of(round, r, count);
        check(cudaMemcpy(parts[r]->data, bits.data(), bits.size() * 2, cudaMemcpyHostToDevice), "upload");
        given.buffers[r] = parts[r]->data;
      }
      Memory<Element> out(room + kGuard);
      sum_parts(given, ranks, out.data, count, nullptr);
      check(cudaDeviceSynchronize(), "sum_parts");
      check_sum(out.read<uint16_t>(out.count), round, ranks, count, "sum_parts of " + std::to_string(ranks));
    }
  }
}

void test_exchange(const NcclApi& api, int count, int64_t tokens, int64_t hidden, int vocab, unsigned seed) {
  const TestModel model({"llama", static_cast<int>(hidden), 1, 8, 8, 8, 64, vocab, false, false, false, false},
                        cuda::kElementType, seed);
  CoreConfig config = model.config(count, 1, "", 64, 16);
  config.max_step_tokens = static_cast<int32_t>(tokens);
  const Layout layout(config);
  const ForwardShape shape(config, layout);
  auto ranks = make_ranks(count);
  std::vector<size_t> before(count), after(count);
  size_t total = 0;
  on_all(ranks, [&](Rank& rank) { check(cudaMemGetInfo(&before[rank.index], &total), "cudaMemGetInfo"); });
  const auto began = Clock::now();
  auto comms = join_ranks(ranks, api, kPatience);
  const double seconds = since(began);
  on_all(ranks, [&](Rank& rank) { check(cudaMemGetInfo(&after[rank.index], &total), "cudaMemGetInfo"); });
  std::printf("%d ranks, %lld tokens x %lld: joined in %.2f s, %.0f MB of GPU 0\n", count,
              static_cast<long long>(tokens), static_cast<long long>(hidden), seconds,
              (static_cast<double>(before[0]) - static_cast<double>(after[0])) / 1e6);
  std::vector<std::unique_ptr<Side>> sides(count);
  on_all(ranks,
         [&](Rank& rank) { sides[rank.index] = std::make_unique<Side>(rank, layout, shape, *comms[rank.index]); });
  const std::string place = std::to_string(count) + " ranks, " + std::to_string(tokens) + " tokens";

  // Sums one after another without a wait, on alternating sides; then the last ones are checked.
  std::mt19937 plan(seed);
  for (int call = 0; call < 24; ++call) {
    const int64_t most = tokens * hidden;
    const int64_t n = call == 0 ? most
                      : call == 1
                          ? 1
                          : 1 + static_cast<int64_t>(plan()) % std::min(most, int64_t{call % 4 == 0 ? 1 << 22 : 20000});
    on_all(ranks, [&](Rank& rank) {
      Side& side = *sides[rank.index];
      const auto bits = part_of(call, rank.index, (n + 7) / 8 * 8);
      side.out.poison(rank.stream);
      for (int again = 0; again < 3; ++again) {
        // The first two have other numbers, and must leave no trace.
        const auto stale = part_of(call + 1000 + again, rank.index, std::min<int64_t>((n + 7) / 8 * 8, 4096));
        const auto& given = again == 2 ? bits : stale;
        rank.progress().begin_step();
        side.exchange->begin_step(nullptr);
        check(cudaMemcpyAsync(side.exchange->part(again % 2), given.data(), given.size() * 2, cudaMemcpyHostToDevice,
                              rank.stream),
              "upload");
        side.exchange->sum(again % 2, 0, side.out.data, again == 2 ? n : static_cast<int64_t>(stale.size()));
        side.exchange->wait();
        rank.progress().end_step();
      }
      const int64_t seen = std::min((n + 7) / 8 * 8 + 4096, side.out.count);
      auto got = side.out.read<uint16_t>(seen);
      check_sum(got, call, count, n, place + ", rank " + std::to_string(rank.index) + ", sum " + std::to_string(call));
    });
  }

  // Rows of logits, in one piece or in several if the exchange buffers are small.
  for (const int64_t rows : {int64_t{1}, std::max<int64_t>(1, shape.rows / 2), shape.rows}) {
    const auto element = [&](int64_t row, int64_t column) {
      return static_cast<float>(mix(static_cast<uint32_t>(row * 100003 + column + rows)) >> 8);
    };
    on_all(ranks, [&](Rank& rank) {
      Side& side = *sides[rank.index];
      side.logits.poison(rank.stream);
      std::vector<float> own(static_cast<size_t>(rows * layout.vocab_rows));
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < layout.vocab_rows; ++c)
          own[r * layout.vocab_rows + c] = element(r, rank.index * layout.vocab_rows + c);
      }
      float* const to = side.exchange->logits() + rank.index * layout.vocab_rows;
      check(cudaMemcpy2DAsync(to, shape.logits_ld * 4, own.data(), layout.vocab_rows * 4, layout.vocab_rows * 4, rows,
                              cudaMemcpyHostToDevice, rank.stream),
            "upload");
      rank.progress().begin_step();
      side.exchange->next_logits();
      side.exchange->gather_logits(static_cast<int>(rows));
      side.exchange->wait();
      rank.progress().end_step();
    });
    check(cudaSetDevice(0), "cudaSetDevice");
    const auto got = sides[0]->logits.read<float>(sides[0]->logits.count);
    for (int64_t i = 0; i < static_cast<int64_t>(got.size()); ++i) {
      const int64_t row = i / shape.logits_ld, column = i % shape.logits_ld;
      const bool inside = row < rows && column < count * layout.vocab_rows;
      if (!CHECKF(inside ? got[i] == element(row, column) : std::isnan(got[i]),
                  "%s: logits of %lld rows: row %lld, column %lld is %.9g, expected %.9g", place.c_str(),
                  static_cast<long long>(rows), static_cast<long long>(row), static_cast<long long>(column), got[i],
                  inside ? element(row, column) : NAN))
        break;
    }
  }
  on_all(ranks, [&](Rank& rank) {
    sides[rank.index]->check_guards(shape);
    sides[rank.index].reset();
  });
  finish_all(ranks, comms);
}

// Broadcast, all-reduce and all-gather as trainers' groups use them.
void test_collectives(const NcclApi& api, int count) {
  auto ranks = make_ranks(count);
  auto comms = join_ranks(ranks, api, kPatience);
  constexpr int64_t kCount = 100003;
  on_all(ranks, [&](Rank& rank) {
    NcclComm& comm = *comms[rank.index];
    Memory<float> mine(kCount), all(kCount * count);
    std::vector<float> host(kCount);
    const auto upload = [&](int call) {
      for (int64_t i = 0; i < kCount; ++i) host[i] = value(call, rank.index, i);
      check(cudaMemcpyAsync(mine.data, host.data(), kCount * 4, cudaMemcpyHostToDevice, rank.stream), "upload");
      check(cudaStreamSynchronize(rank.stream), "upload");
    };
    const auto expect = [&](const char* what, const std::vector<float>& got, auto expected) {
      for (size_t i = 0; i < got.size(); ++i) {
        const double right = expected(static_cast<int64_t>(i));
        if (!CHECKF(std::abs(got[i] - right) <= 1e-4, "%s, rank %d of %d: element %zu is %g, expected %g", what,
                    rank.index, count, i, got[i], right))
          return;
      }
    };
    const int root = count - 1;
    upload(1);
    // Bytes, and without a source on the receivers.
    comm.broadcast(rank.index == root ? mine.data : nullptr, mine.data, kCount * 4, kNcclUint8, root, rank.stream);
    check(cudaStreamSynchronize(rank.stream), "broadcast");
    expect("broadcast", mine.read<float>(kCount), [&](int64_t i) { return value(1, root, i); });
    upload(2);
    comm.all_gather(mine.data, all.data, kCount, kNcclFloat32, rank.stream);
    comm.all_reduce(mine.data, mine.data, kCount, kNcclFloat32, kNcclSum, rank.stream);
    check(cudaStreamSynchronize(rank.stream), "all_reduce");
    expect("all_gather", all.read<float>(kCount * count),
           [&](int64_t i) { return value(2, static_cast<int>(i / kCount), i % kCount); });
    expect("all_reduce", mine.read<float>(kCount), [&](int64_t i) {
      double sum = 0;
      for (int r = 0; r < count; ++r) sum += value(2, r, i);
      return sum;
    });
  });
  finish_all(ranks, comms);
}

template <class F>
std::string message_of(F&& fn) {
  try {
    fn();
  } catch (const NcclError& error) {
    return error.what();
  } catch (const std::exception& error) {
    return std::string("(another exception) ") + error.what();
  }
  return "(no exception)";
}

// On one GPU: a peer that never comes, and a thread whose wait is cancelled.
void test_alone(const NcclApi& api) {
  Rank rank(0, 0);
  rank.run([&] {
        const NcclUniqueId id = new_nccl_id(api);
        auto began = Clock::now();
        const std::string late = message_of([&] { NcclComm comm(api, id, 2, 0, {2}); });
        CHECKF(has(late, "rank 0 of 2, joining the communicator: not done after 2 s"), "%s", late.c_str());
        CHECKF(since(began) >= 2 && since(began) < 12, "%.1f s to give up after 2", since(began));
        std::printf("a peer that never comes: %.1f s; %s\n", since(began), late.c_str());

        std::atomic<bool> cancel{false};
        std::thread other([&] {
          std::this_thread::sleep_for(std::chrono::milliseconds(500));
          cancel = true;
        });
        began = Clock::now();
        const std::string message = message_of([&] { NcclComm comm(api, new_nccl_id(api), 2, 0, {600, &cancel}); });
        other.join();
        CHECKF(has(message, "given up after"), "%s", message.c_str());
        CHECKF(since(began) < 10, "%.1f s to be cancelled after 0.5", since(began));

        // The GPU is as before: a communicator of one rank works at once.
        NcclComm comm(api, new_nccl_id(api), 1, 0, {kPatience});
        Memory<float> one(4);
        comm.all_reduce(one.data, one.data, 4, kNcclFloat32, kNcclSum, rank.stream);
        check(cudaStreamSynchronize(rank.stream), "all_reduce of one");
        comm.finish();
      })
      .get();
}

// Two ranks on one GPU: NCCL refuses it, and no rank waits for ever.
void test_same_gpu(const NcclApi& api) {
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int r = 0; r < 2; ++r) ranks.push_back(std::make_unique<Rank>(r, 0));
  const auto began = Clock::now();
  const std::string message = message_of([&] { join_ranks(ranks, api, 20); });
  CHECKF(has(message, "joining the communicator"), "%s", message.c_str());
  CHECKF(since(began) < 30, "%.1f s", since(began));
  std::printf("two ranks on one GPU: %.1f s; %s\n", since(began), message.c_str());
  std::string text;
  try {
    setenv("REFIT_CUDA_NO_PEERS", "1", 1);
    why_nccl({0, 0});
  } catch (const std::invalid_argument& error) {
    text = error.what();
  }
  unsetenv("REFIT_CUDA_NO_PEERS");
  CHECKF(has(text, "share GPU 0") && has(text, "REFIT_CUDA_NO_PEERS"), "%s", text.c_str());
}

// A rank whose peer takes no part in a group: its kernel waits, and abort ends it.
void test_stopped_peer(const NcclApi& api) {
  auto ranks = make_ranks(2);
  auto comms = join_ranks(ranks, api, kPatience);
  ranks[0]
      ->run([&] {
        Memory<float> room(1 << 20);
        NcclComm& comm = *comms[0];
        comm.group([&] {
          comm.send(room.data, 1 << 20, kNcclFloat32, 1, ranks[0]->stream);
          comm.recv(room.data, 1 << 20, kNcclFloat32, 1, ranks[0]->stream);
        });
        std::this_thread::sleep_for(std::chrono::seconds(1));
        CHECK(cudaStreamQuery(ranks[0]->stream) == cudaErrorNotReady);
        cudaGetLastError();
        comm.check();  // no failure yet: the peer may still come
        const auto began = Clock::now();
        comm.abort();
        check(cudaStreamSynchronize(ranks[0]->stream), "the stream after abort");
        CHECKF(since(began) < 10, "%.1f s until abort freed the stream", since(began));
        std::printf("abort of a kernel that waits for its peer: %.2f s\n", since(began));
      })
      .get();
  ranks[1]->run([&] { comms[1]->abort(); }).get();
  comms = join_ranks(ranks, api, kPatience);
  finish_all(ranks, comms);
}

size_t entries(const char* folder) {
  size_t count = 0;
  if (DIR* dir = opendir(folder)) {
    while (readdir(dir) != nullptr) ++count;
    closedir(dir);
  }
  return count;
}

// Joining and leaving again and again leaves nothing behind.
void test_rounds(const NcclApi& api, int rounds) {
  auto ranks = make_ranks(2);
  size_t threads = 0, files = 0, free = 0, total = 0;
  for (int round = 0; round < rounds; ++round) {
    auto comms = join_ranks(ranks, api, kPatience);
    if (round % 2 == 0) {
      finish_all(ranks, comms);
    } else {
      on_all(ranks, [&](Rank& rank) { comms[rank.index]->abort(); });
    }
    comms.clear();
    if (round != 2) continue;
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    threads = entries("/proc/self/task"), files = entries("/proc/self/fd");
    check(cudaSetDevice(0), "cudaSetDevice"), check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  size_t left = 0;
  check(cudaMemGetInfo(&left, &total), "cudaMemGetInfo");
  const size_t threads_now = entries("/proc/self/task"), files_now = entries("/proc/self/fd");
  CHECKF(threads_now <= threads + 1, "%zu threads, %zu after three rounds", threads_now, threads);
  CHECKF(files_now <= files + 2, "%zu descriptors, %zu after three rounds", files_now, files);
  CHECKF(left + (64u << 20) >= free, "%.0f MB of GPU 0 were not given back", (free - left) / 1e6);
  std::printf("%d rounds: threads %zu and %zu, descriptors %zu and %zu, %.0f MB less of GPU 0\n", rounds, threads,
              threads_now, files, files_now, (static_cast<double>(free) - static_cast<double>(left)) / 1e6);
}

int run(bool quick, unsigned seed) {
  int gpus = 0;
  check(cudaGetDeviceCount(&gpus), "cudaGetDeviceCount");
  std::printf("nccl_test: seed %u, %d GPUs\n", seed, gpus);
  check(cudaSetDevice(0), "cudaSetDevice");
  test_sum_parts(seed);
  if (quick) return test::finish("nccl_test");
  const NcclApi* api = nullptr;
  try {
    api = &open_nccl();
  } catch (const std::runtime_error& error) {
    std::printf("!!!!! NCCL IS NOT HERE, SO NOTHING OF IT WAS TESTED: %s\n", error.what());
    return test::finish("nccl_test");
  }
  std::printf("%s, %s\n", api->name().c_str(), api->path.c_str());
  test_alone(*api);
  test_same_gpu(*api);
  if (gpus < 2) {
    std::printf("!!!!! ONE GPU: the exchange between ranks WAS NOT TESTED, it needs two\n");
    return test::finish("nccl_test");
  }
  for (const int ranks : {2, 4, 8}) {
    if (gpus < ranks) continue;
    test_exchange(*api, ranks, 4096, 1024, 1001, seed);
    // The exchange buffers hold only one row of the others' logits.
    test_exchange(*api, ranks, 1, 64, 5003, seed + 1);
    test_collectives(*api, ranks);
  }
  test_stopped_peer(*api);
  test_rounds(*api, 9);
  return test::finish("nccl_test");
}

}  // namespace
}  // namespace refit::cuda

int main(int argc, char** argv) {
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  bool quick = false;
  unsigned seed = 1;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--quick") == 0) {
      quick = true;
    } else {
      seed = static_cast<unsigned>(std::strtoul(argv[i], nullptr, 10));
    }
  }
  return refit::cuda::run(quick, seed);
}
