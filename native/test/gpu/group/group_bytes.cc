// The bytes of NCCL process groups: broadcasts into slots and into the weights, parameters, sends.
#include <random>

#include "core/write/places.h"
#include "cuda/group/group_library.h"
#include "test/gpu/group/group_world.h"

namespace refit::test {
namespace {

// Ranks 1 to `ranks` of a group of `size` are ours; the others only receive.
void test_receive(int ranks, int size, unsigned seed) {
  std::mt19937 rng(seed);
  Engine engine(ranks);
  auto group = engine.group({size, 1});
  const auto id = nccl_group_id(library);
  Trainer trainer(id, size, 0);
  std::vector<std::unique_ptr<Trainer>> others;
  std::vector<std::thread> joining;
  joining.emplace_back([&] { trainer.join(); });
  for (int rank = ranks + 1; rank < size; rank++) {
    others.push_back(std::make_unique<Trainer>(id, size, rank));
    joining.emplace_back([other = others.back().get()] { other->join(); });
  }
  CHECK_THROWS(group->receive(0, {}, 0, in(5)), std::invalid_argument);  // not connected
  group->connect(id.data(), in(20));
  for (auto& thread : joining) thread.join();
  CHECK_THROWS(group->connect(id.data(), in(20)), std::invalid_argument);
  CHECK_THROWS(group->staged(0), std::invalid_argument);
  constexpr uint64_t kSlot = 40000;
  group->stage(kSlot);
  CHECKF(gpus.bytes >= ranks * 2 * static_cast<int64_t>(kSlot), "%lld", static_cast<long long>(gpus.bytes));

  for (int round = 0; round < 12; round++) {
    const int slot = round % 2;
    std::vector<GroupPart> parts;
    std::vector<std::vector<uint8_t>> data;
    uint64_t at = 0;
    const size_t count = round == 3 ? 0 : round == 4 ? 200 : 1 + rng() % 6;
    for (size_t i = 0; i < count; i++) {
      const uint64_t bytes = round == 5 ? kSlot : round == 4 ? rng() % 60 : rng() % 6000;
      if (at + bytes > kSlot) break;
      parts.push_back({at, bytes});
      data.push_back(coded(static_cast<uint64_t>(round) * 1000 + i, bytes));
      at = (at + bytes + 255) / 256 * 256;
      if (round == 4) at = parts.back().offset + bytes;
    }
    const StagedSlot before = group->staged(1 - slot);
    std::vector<std::vector<uint8_t>> kept;
    for (const uint8_t* from : before.source.rank_data) kept.emplace_back(from, from + kSlot);
    std::vector<std::vector<uint8_t>> sinks(others.size());
    std::thread sending([&] {
      if (round % 3 == 0) sleep_ms(20);  // late
      for (const auto& bytes : data) trainer.broadcast(bytes);
      for (size_t o = 0; o < others.size(); o++) {
        for (const auto& bytes : data) {
          sinks[o].resize(std::max<size_t>(1, bytes.size()));
          others[o]->comm->broadcast(nullptr, sinks[o].data(), bytes.size(), kNcclUint8, 0, others[o]->stream());
          others[o]->stream_wait();
        }
      }
    });
    group->receive(slot, parts, 0, in(20));
    sending.join();
    trainer.stream_wait();
    const StagedSlot staged = group->staged(slot);
    CHECK(staged.source.bytes == kSlot && staged.source.rank_data.size() == static_cast<size_t>(ranks));
    CHECK(staged.source.on_gpu());
    for (int rank = 0; rank < ranks; rank++) {
      const uint8_t* const from = staged.source.of(rank);
      for (size_t i = 0; i < parts.size(); i++) {
        CHECKF(data[i].empty() || std::memcmp(from + parts[i].offset, data[i].data(), data[i].size()) == 0,
               "round %d, rank %d, part %zu", round, rank, i);
      }
      CHECKF(std::memcmp(before.source.of(rank), kept[static_cast<size_t>(rank)].data(), kSlot) == 0,
             "round %d, rank %d: the other slot changed", round, rank);
    }
  }

  // A call that does not fit is refused before NCCL is called; the group still works.
  CHECK_THROWS(group->receive(0, {{1, kSlot}}, 0, in(5)), std::invalid_argument);
  CHECK_THROWS(group->receive(0, {{UINT64_MAX, 2}}, 0, in(5)), std::invalid_argument);
  CHECK_THROWS(group->receive(0, {{0, 1}}, 1, in(5)), std::invalid_argument);
  CHECK_THROWS(group->receive(0, {{0, 1}}, size, in(5)), std::invalid_argument);
  CHECK_THROWS(group->send(nullptr, kSlot + 1, in(5)), std::invalid_argument);
  if (ranks > 1) CHECK_THROWS(group->params(0, 0, 0, in(5)), std::invalid_argument);
}

void test_exchange() {
  // A barrier, a send, slots of another size.
  Engine engine(2);
  auto group = engine.group({3, 1});
  const auto id = nccl_group_id(library);
  Trainer trainer(id, 3, 0);
  connect(*group, trainer, id);
  trainer.barrier();
  group->barrier(in(20));
  trainer.stream_wait();
  CHECKF(trainer.sum() == 1, "the sum is %g", trainer.sum());
  group->stage(1000);
  const auto data = coded(77, 999);
  std::vector<uint8_t> got(999);
  trainer.comm->broadcast(nullptr, got.data(), got.size(), kNcclUint8, 1, trainer.stream());
  group->send(data.data(), data.size(), in(20));
  trainer.stream_wait();
  CHECK(got == data);
  const int64_t small = gpus.bytes;
  group->stage(100000);
  CHECK(gpus.bytes > small);
  gpus.room = gpus.bytes + 1000;
  CHECK_THROWS(group->stage(1 << 20), NoMemory);
  CHECK_THROWS(group->staged(0), std::invalid_argument);  // none rather than some
  gpus.room = int64_t{1} << 40;
  group->stage(100000);
  std::thread sending([&] { trainer.broadcast(data); });
  group->receive(1, {{512, 999}}, 0, in(20));
  sending.join();
  for (int rank = 0; rank < 2; rank++) {
    CHECK(std::memcmp(group->staged(1).source.of(rank) + 512, data.data(), data.size()) == 0);
  }
  CHECK(group->read(1, 512, 999, in(20)) == data);
  CHECK(group->read(1, 519, 3, in(20)) == std::vector<uint8_t>(data.begin() + 7, data.begin() + 10));
  CHECK_THROWS(group->read(1, 100000, 1, in(5)), std::invalid_argument);
  CHECK_THROWS(group->read(1, UINT64_MAX, 2, in(5)), std::invalid_argument);
  // One slot takes half the memory of two, and the other slot does not exist.
  const int64_t two = gpus.bytes;
  group->stage(100000, 1);
  const int64_t one = gpus.bytes;
  CHECKF(two - one >= 2 * 100000 && two - one < 2 * 101000, "%lld bytes on two GPUs",
         static_cast<long long>(two - one));
  std::thread again([&] { trainer.broadcast(data); });
  group->receive(0, {{0, 999}}, 0, in(20));
  again.join();
  CHECK(group->read(0, 0, 999, in(20)) == data);
  CHECK_THROWS(group->staged(1), std::invalid_argument);
  CHECK_THROWS(group->receive(1, {{0, 1}}, 0, in(5)), std::invalid_argument);
  CHECK_THROWS(group->read(1, 0, 1, in(5)), std::invalid_argument);
  group->stage(100000, 2);
  CHECK(gpus.bytes == two && group->staged(1).source.bytes == 100000);
  group->stage(0);
  CHECK_THROWS(group->staged(0), std::invalid_argument);
  group->end();
  group->end();
  CHECK_THROWS(group->barrier(in(5)), std::invalid_argument);
}

// Two engines of two ranks: one group for each rank, all at once, in another order on the other side.
void test_params() {
  Engine sender(2), receiver(2);
  for (int rank = 0; rank < 2; rank++) {
    for (uint64_t p = 0; p < 70; p++) {
      const uint64_t bytes = p * 37 % 500;
      sender.params[static_cast<size_t>(rank)].push_back(coded(static_cast<uint64_t>(rank) * 100 + p, bytes));
      receiver.params[static_cast<size_t>(rank)].emplace_back(bytes);
    }
  }
  std::vector<std::thread> all;
  for (const int side : {0, 1}) {
    for (const int rank : {0, 1}) {
      static std::vector<uint8_t> ids[2];
      if (ids[rank].empty()) ids[rank] = nccl_group_id(library);
      all.emplace_back([&, side, rank, id = ids[rank]] {
        NcclGroupOptions options{2, side};
        options.core_rank = rank;
        auto group = (side == 0 ? sender : receiver).group(options);
        group->connect(id.data(), in(20));
        if (rank == side) sleep_ms(30);
        CHECK_THROWS(group->params(1 - rank, 0, 0, in(5)), std::invalid_argument);
        group->params(rank, 0, 0, in(20));
        group->stage(10);
        CHECK_THROWS(group->staged(0), std::invalid_argument);
        group->barrier(in(20));
        group->end();  // in order: the remaining ranks would see an abort
      });
    }
  }
  for (auto& thread : all) thread.join();
  CHECK(sender.params == receiver.params);
}

// Parameters of [4, 8] bfloat16 (64 bytes), adjacent except the last one; tensors of the same shape, in the same order.
void test_in_place(int ranks) {
  constexpr uint64_t kParam = 64, kGap = 32;
  constexpr size_t kParams = 4;
  std::vector<std::vector<uint8_t>> weights(static_cast<size_t>(ranks),
                                            std::vector<uint8_t>(kParams * kParam + kGap, 0xee));
  bool released = false;
  NcclGroupOptions options{ranks + 1, 1};
  const auto make = [&] {
    options.library = library;
    GroupHost host;
    host.ranks = ranks;
    host.open = [](int rank) { return std::make_unique<LoopGpu>(rank, gpus); };
    host.params = [&](int rank, int /* set */) {
      if (released) throw std::runtime_error("released");
      std::vector<GroupSpan> out;
      for (size_t i = 0; i < kParams; i++) {
        uint8_t* const begin = weights[static_cast<size_t>(rank)].data();
        out.push_back({begin + i * kParam + (i + 1 == kParams ? kGap : 0), kParam, 16});
      }
      return out;
    };
    host.lose = [](const std::string& message) { losses.push_back(message); };
    return std::make_unique<GpuGroup>(std::move(host), options);
  };
  std::vector<Tensor> tensors;
  std::vector<Rect> rects;
  for (int i = 0; i < static_cast<int>(kParams); i++) {
    tensors.push_back({0, static_cast<uint64_t>(i) * kParam, DType::kBFloat16, 4, 8, 16, 2});
    for (int rank = 0; rank < ranks; rank++) rects.push_back({i, rank, i, 0, 0, 4, 8, 0, 0});
  }
  auto group = make();
  CHECK((group->places({{0, 3 * kParam}, {3 * kParam, kParam}, {0, 4 * kParam}, {64, 0}}, tensors, rects, 0) ==
         std::vector<uint64_t>{0, 3 * kParam + kGap, kNoPlace, 0}));
  std::vector<Rect> one = rects;
  if (ranks > 1) {
    std::erase_if(one, [&](const Rect& rect) { return rect.rank == ranks - 1 && rect.tensor == 1; });
    CHECK((group->places({{0, kParam}, {kParam, kParam}}, tensors, one, 0) == std::vector<uint64_t>{0, kNoPlace}));
    options = {2, 1};
    options.core_rank = 1;
    CHECK((make()->places({{0, kParam}}, tensors, rects, 0) == std::vector<uint64_t>{kNoPlace}));
  }
  released = true;
  CHECK_THROWS(group->places({{0, kParam}}, tensors, rects, 0), std::runtime_error);
  released = false;

  CHECK_THROWS(group->receive_in_place({{0, 1}}, 0, 0, in(5)), std::invalid_argument);  // not connected
  const auto id = nccl_group_id(library);
  Trainer trainer(id, ranks + 1, 0);
  connect(*group, trainer, id);
  const int64_t held = gpus.bytes;
  // Past the weights, into the gap, from one of our ranks: NCCL is not called, and the group still works.
  const std::vector<GroupPart> wrong{
      {4 * kParam, kParam + 1}, {3 * kParam - 1, 2}, {3 * kParam, 1}, {UINT64_MAX, 2}, {4 * kParam + kGap, 1}};
  for (const GroupPart& part : wrong) {
    CHECK_THROWS(group->receive_in_place({{0, 1}, part}, 0, 0, in(5)), std::invalid_argument);
  }
  CHECK_THROWS(group->receive_in_place({{0, 1}}, 0, 1, in(5)), std::invalid_argument);
  const std::vector<uint8_t> first = coded(1, 3 * kParam), last = coded(2, kParam);
  std::thread sending([&] {
    trainer.broadcast(first);
    trainer.broadcast(last);
  });
  group->receive_in_place({{0, 3 * kParam}, {5, 0}, {3 * kParam + kGap, kParam}}, 0, 0, in(20));
  sending.join();
  trainer.stream_wait();
  std::vector<uint8_t> expected = first;
  expected.insert(expected.end(), kGap, 0xee);
  expected.insert(expected.end(), last.begin(), last.end());
  for (const auto& rank : weights) CHECK(rank == expected);
  CHECKF(gpus.bytes == held, "%lld bytes were staged", static_cast<long long>(gpus.bytes - held));
  // It stops between two broadcasts: the first has arrived, and the group is unusable.
  const std::vector<uint8_t> again = coded(3, kParam);
  trainer.broadcast(again);
  expect(failure_of(
             [&] {
               group->receive_in_place({{0, kParam}, {kParam, kParam}}, 0, 0, in(0.4));
             },
             GroupErrorKind::kTimeout),
         {"receiving", "broadcast 2 of 2: not done after"});
  for (const auto& rank : weights) {
    CHECK(std::memcmp(rank.data(), again.data(), kParam) == 0);
    CHECK(std::memcmp(rank.data() + kParam, first.data() + kParam, 2 * kParam) == 0);
  }
  expect(failure_of(
             [&] {
               group->receive_in_place({{0, 1}}, 0, 0, in(5));
             },
             GroupErrorKind::kBroken),
         {"failed before"});
  trainer.comm->abort();
}

// One slot receives while the other, which is complete, is read; a third receive is refused.
void test_ahead(int ranks) {
  constexpr uint64_t kPiece = 3000, kRest = 7;
  const auto size = [](int round) { return kPiece - static_cast<uint64_t>(round); };
  NcclGroupOptions options{ranks + 1, 1};
  Engine engine(ranks);
  auto group = engine.group(options);
  CHECK_THROWS(group->arrive(in(5)), std::invalid_argument);  // not connected
  const auto id = nccl_group_id(library);
  Trainer trainer(id, ranks + 1, 0);
  connect(*group, trainer, id);
  group->stage(kPiece + kRest);
  CHECK_THROWS(group->arrive(in(5)), std::invalid_argument);  // nothing was begun
  const auto begin = [&](int round) { group->begin(round % 2, {{kRest, size(round)}, {0, kRest}}, 0, in(20)); };
  const auto data = [&](int round) { return coded(static_cast<uint64_t>(round), size(round)); };
  const auto rest = [](int round) { return coded(100 + static_cast<uint64_t>(round), kRest); };
  begin(0);
  begin(1);
  CHECK_THROWS(begin(2), std::invalid_argument);
  CHECK_THROWS(group->stage(2 * kPiece), std::invalid_argument);
  CHECK_THROWS(group->barrier(in(5)), std::invalid_argument);
  for (int round = 0; round < 20; round++) {
    const std::vector<uint8_t> sent = data(round), behind = rest(round);
    trainer.broadcast(sent);
    trainer.broadcast(behind);
    group->arrive(in(20));
    trainer.stream_wait();
    for (const uint8_t* slot : group->staged(round % 2).source.rank_data) {
      CHECK(std::memcmp(slot + kRest, sent.data(), sent.size()) == 0 && std::memcmp(slot, behind.data(), kRest) == 0);
    }
    begin(round + 2);
  }
  // The first of two receives stops midway: the error names it, and the second is given up with it.
  const std::vector<uint8_t> last = data(20);
  trainer.broadcast(last);
  expect(failure_of([&] { group->arrive(in(0.4)); }, GroupErrorKind::kTimeout),
         {"receiving", "broadcast 2 of 2: not done after"});
  expect(failure_of([&] { group->arrive(in(20)); }, GroupErrorKind::kBroken), {"failed before"});
  trainer.comm->abort();
}

// Aborted while two receives are pending, with or without a waiting call: the next call that waits takes them off the
// GPUs, not only the end of the group.
void test_ahead_aborted(bool is_waited_for) {
  Engine engine(2);
  auto group = engine.group({3, 1});
  const auto id = nccl_group_id(library);
  Trainer trainer(id, 3, 0);
  connect(*group, trainer, id);
  group->stage(100);
  group->begin(0, {{0, 100}}, 0, in(20));
  group->begin(1, {{0, 100}}, 0, in(20));
  CHECK(control->live == 3);
  std::thread aborting([&] {
    if (is_waited_for) sleep_ms(100);
    group->abort("no longer needed");
  });
  if (!is_waited_for) aborting.join();
  expect(failure_of([&] { group->arrive(in(20)); }, GroupErrorKind::kBroken), {"no longer needed"});
  CHECKF(control->live == 1, "%d communicators live", control->live);
  expect(failure_of([&] { group->arrive(in(20)); }, GroupErrorKind::kBroken), {"failed before", "no longer needed"});
  if (is_waited_for) aborting.join();
  group->end();
  trainer.comm->abort();
}

}  // namespace

void test_bytes(unsigned seed) {
  for (const auto& [ranks, size] : {std::pair{1, 2}, {1, 4}, {2, 3}, {3, 5}}) {
    test_receive(ranks, size, seed);
    expect_none_left("receive");
  }
  test_exchange();
  expect_none_left("exchange");
  test_params();
  expect_none_left("parameters");
  for (const int ranks : {1, 2}) {
    test_in_place(ranks);
    expect_none_left("in place");
    test_ahead(ranks);
    expect_none_left("ahead");
  }
  for (const bool is_waited_for : {true, false}) {
    test_ahead_aborted(is_waited_for);
    expect_none_left("ahead, aborted");
  }
}

}  // namespace refit::test
