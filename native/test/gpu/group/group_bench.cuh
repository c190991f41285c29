// group_test --bench: receiving with scatter against plain NCCL, in pieces of 512 MB.
#pragma once
#include <vector>

#include "test/gpu/group/group_engine.cuh"

namespace {

void bench(const std::vector<int>& gpus, double gigabytes) {
  constexpr int64_t kRows = 4096, kCols = 4096;
  constexpr size_t kTensors = 16;
  constexpr uint64_t kPiece = kTensors * kRows * kCols * 2;  // 512 MiB
  const int pieces = std::max(2, static_cast<int>(std::lround(gigabytes * 1e9 / static_cast<double>(kPiece))));
  std::vector<Param> shapes;
  for (size_t i = 0; i < 4 * kTensors; i++) shapes.push_back({"w" + std::to_string(i), kRows, kCols});
  Engine engine(gpus, shapes);
  Trainer trainer;
  double seconds = 0;
  auto group = meet(engine, {&trainer}, &seconds);
  group->stage(kPiece);
  const double total = static_cast<double>(kPiece) * pieces;
  const auto send = [&](int rounds) {
    Command c = command('T', 7);
    c.rounds = rounds;
    trainer.send(c, {kPiece});
  };
  send(2);  // warm
  for (int i = 0; i < 2; i++) group->receive(i, {{0, kPiece}}, 0, in(kPatience));
  trainer.reply();
  double plain = 0, received = 0, scattered = 0, gap = 0;
  for (int round = 0; round < 3; round++) {
    // Plain: the same broadcasts one after another on one stream, with one wait at the end.
    send(pieces);
    const std::vector<GroupPart> same(static_cast<size_t>(pieces), GroupPart{0, kPiece});
    auto began = Clock::now();
    group->receive(0, same, 0, in(kPatience));
    plain = std::max(plain, total / since(began));
    trainer.reply();

    send(pieces);
    began = Clock::now();
    for (int i = 0; i < pieces; i++) group->receive(i % 2, {{0, kPiece}}, 0, in(kPatience));
    received = std::max(received, total / since(began));
    trainer.reply();

    send(pieces);
    began = Clock::now();
    std::future<WriteOutcome> writing;
    for (int i = 0; i < pieces; i++) {
      group->receive(i % 2, {{0, kPiece}}, 0, in(kPatience));
      const auto waits = Clock::now();
      if (writing.valid()) CHECK(writing.get().error.empty());
      gap = std::max(gap, since(waits));
      writing = std::async(std::launch::async, [&, i] {
        return engine.store->write(job_of(*group, i % 2, kTensors, static_cast<size_t>(i % 4) * kTensors, kRows, kCols,
                                          static_cast<int>(engine.gpus.size())));
      });
    }
    CHECK(writing.get().error.empty());
    scattered = std::max(scattered, total / since(began));
    trainer.reply();
  }
  std::printf("%zu receivers, %.1f GB in %d pieces of %.0f MB, communicator in %.0f ms, best of 3:\n", gpus.size(),
              total / 1e9, pieces, static_cast<double>(kPiece) / 1e6, seconds * 1e3);
  std::printf("  plain NCCL broadcasts      %7.1f GB/s\n", plain / 1e9);
  std::printf("  received, each waited for  %7.1f GB/s  %5.1f %%\n", received / 1e9, 100 * received / plain);
  std::printf("  received and scattered     %7.1f GB/s  %5.1f %%  (longest wait for a scatter %.2f ms)\n",
              scattered / 1e9, 100 * scattered / plain, gap * 1e3);
}

}  // namespace
