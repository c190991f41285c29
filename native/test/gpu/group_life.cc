// Process groups of NCCL against native/test/nccl_loop.cc, whose ranks are threads and whose cards are host memory:
// joined, received from, sent to, given up, ended. Built and run by test/native/nccl-groups.test.ts. Arguments: the
// library's file [seed].
#include <dirent.h>
#include <dlfcn.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>

#include "core/device.h"
#include "core/memory_error.h"
#include "core/places.h"
#include "cuda/group.h"
#include "cuda/group_library.h"
#include "cuda/group_words.h"
#include "test/check.h"
#include "test/loop_card.h"

using namespace refit;
using namespace refit::cuda;
using namespace refit::test;

namespace {

using Clock = std::chrono::steady_clock;

std::string library;
LoopControl* control = nullptr;
LoopCards cards;
std::vector<std::string> losses;

GroupDeadline in(double seconds) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}
double since(Clock::time_point began) { return std::chrono::duration<double>(Clock::now() - began).count(); }
void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

uint8_t value(uint64_t round, uint64_t i) {
  uint64_t z = round * 0x9e3779b97f4a7c15u + i * 0xbf58476d1ce4e5b9u;
  z ^= z >> 29;
  return static_cast<uint8_t>(z * 0x94d049bb133111ebu >> 56);
}

std::vector<uint8_t> coded(uint64_t round, uint64_t bytes) {
  std::vector<uint8_t> out(bytes);
  for (uint64_t i = 0; i < bytes; i++) out[i] = value(round, i);
  return out;
}

struct Engine {
  explicit Engine(int ranks) : params(static_cast<size_t>(ranks)) {}
  std::vector<std::vector<std::vector<uint8_t>>> params;  // [rank][parameter]

  std::unique_ptr<CardGroup> group(NcclGroupOptions options) {
    options.library = library;
    GroupHost host;
    host.ranks = static_cast<int>(params.size());
    host.open = [](int rank) { return std::make_unique<LoopCard>(rank, cards); };
    host.params = [this](int rank) {
      std::vector<GroupSpan> out;
      for (auto& param : params[static_cast<size_t>(rank)]) out.push_back({param.data(), param.size(), param.size()});
      return out;
    };
    host.lose = [](const std::string& message) { losses.push_back(message); };
    return std::make_unique<CardGroup>(std::move(host), options);
  }
};

// The other side: a rank that calls NCCL itself, as a trainer's torch does.
struct Trainer {
  Trainer(const std::vector<uint8_t>& id, int size, int rank) : id_(id), size_(size), rank_(rank) {}
  ~Trainer() { stream_wait(); }
  void join(double seconds = 20) {
    NcclUniqueId unique;
    std::memcpy(unique.bytes, id_.data(), sizeof unique.bytes);
    comm = std::make_unique<NcclComm>(open_nccl(library), unique, size_, rank_, NcclWait{seconds});
  }
  NcclStream stream() { return reinterpret_cast<NcclStream>(&stream_); }
  void broadcast(const std::vector<uint8_t>& data) {
    comm->broadcast(data.data(), nullptr, data.size(), kNcclUint8, rank_, stream());
  }
  void barrier() {
    one_ = 1;
    comm->all_reduce(&one_, &one_, 1, kNcclFloat32, kNcclSum, stream());
  }
  void stream_wait() {
    for (const auto began = Clock::now(); !stream_.idle() && since(began) < 30;) sleep_ms(1);
  }
  float sum() const { return one_; }

  std::unique_ptr<NcclComm> comm;

 private:
  const std::vector<uint8_t> id_;
  const int size_, rank_;
  float one_ = 1;
  LoopStream stream_;
};

std::string failure_of(const std::function<void()>& fn, GroupErrorKind kind) {
  try {
    fn();
  } catch (const GroupError& error) {
    CHECKF(error.kind == kind, "kind %d, expected %d: %s", static_cast<int>(error.kind), static_cast<int>(kind),
           error.what());
    return error.what();
  } catch (const std::exception& error) {
    CHECKF(false, "another exception: %s", error.what());
    return error.what();
  }
  CHECK(!"no exception");
  return "";
}

void expect(const std::string& said, std::initializer_list<const char*> parts) {
  for (const char* part : parts) {
    CHECKF(said.find(part) != std::string::npos, "\"%s\" misses \"%s\"", said.c_str(), part);
  }
}

void expect_none_left(const char* after) {
  CHECKF(control->live == 0, "%s: %d communicators live", after, control->live);
  CHECKF(cards.bytes == 0, "%s: %lld bytes are left", after, static_cast<long long>(cards.bytes));
  CHECKF(cards.open == 0, "%s: %d cards are open", after, cards.open.load());
  CHECKF(losses.empty(), "%s: %s", after, losses.empty() ? "" : losses[0].c_str());
}

size_t threads() {
  size_t count = 0;
  DIR* const folder = opendir("/proc/self/task");
  while (readdir(folder) != nullptr) count++;
  closedir(folder);
  return count;
}

// Ranks 1 to `ranks` of a group of `size` are ours; further ones only listen.
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
  CHECKF(cards.bytes >= ranks * 2 * static_cast<int64_t>(kSlot), "%lld", static_cast<long long>(cards.bytes));

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
    CHECK(staged.source.on_card());
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

  // What does not fit, or cannot be, is refused before anything is called; the group goes on.
  CHECK_THROWS(group->receive(0, {{1, kSlot}}, 0, in(5)), std::invalid_argument);
  CHECK_THROWS(group->receive(0, {{UINT64_MAX, 2}}, 0, in(5)), std::invalid_argument);
  CHECK_THROWS(group->receive(0, {{0, 1}}, 1, in(5)), std::invalid_argument);
  CHECK_THROWS(group->receive(0, {{0, 1}}, size, in(5)), std::invalid_argument);
  CHECK_THROWS(group->send(nullptr, kSlot + 1, in(5)), std::invalid_argument);
  if (ranks > 1) CHECK_THROWS(group->params(0, 0, in(5)), std::invalid_argument);
}

void test_exchange() {
  // A barrier, a send, another size of slots.
  Engine engine(2);
  auto group = engine.group({3, 1});
  const auto id = nccl_group_id(library);
  Trainer trainer(id, 3, 0);
  std::thread joining([&] { trainer.join(); });
  group->connect(id.data(), in(20));
  joining.join();
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
  const int64_t small = cards.bytes;
  group->stage(100000);
  CHECK(cards.bytes > small);
  cards.room = cards.bytes + 1000;
  CHECK_THROWS(group->stage(1 << 20), NoMemory);
  CHECK_THROWS(group->staged(0), std::invalid_argument);  // none rather than some
  cards.room = int64_t{1} << 40;
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
  // One slot takes half the memory of two, and the other is none.
  const int64_t two = cards.bytes;
  group->stage(100000, 1);
  const int64_t one = cards.bytes;
  CHECKF(two - one >= 2 * 100000 && two - one < 2 * 101000, "%lld bytes on two cards",
         static_cast<long long>(two - one));
  std::thread again([&] { trainer.broadcast(data); });
  group->receive(0, {{0, 999}}, 0, in(20));
  again.join();
  CHECK(group->read(0, 0, 999, in(20)) == data);
  CHECK_THROWS(group->staged(1), std::invalid_argument);
  CHECK_THROWS(group->receive(1, {{0, 1}}, 0, in(5)), std::invalid_argument);
  CHECK_THROWS(group->read(1, 0, 1, in(5)), std::invalid_argument);
  group->stage(100000, 2);
  CHECK(cards.bytes == two && group->staged(1).source.bytes == 100000);
  group->stage(0);
  CHECK_THROWS(group->staged(0), std::invalid_argument);
  group->end();
  group->end();
  CHECK_THROWS(group->barrier(in(5)), std::invalid_argument);
}

// As of any other failure, the peers hear of it: they do not wait for a rank that does nothing more.
void test_a_copy_that_fails() {
  Engine engine(1);
  const auto id = nccl_group_id(library);
  Trainer trainer(id, 2, 0);
  auto group = engine.group({2, 1});
  std::thread joining([&] { trainer.join(); });
  group->connect(id.data(), in(20));
  joining.join();
  group->stage(1000);
  const auto data = coded(5, 999);
  trainer.broadcast(data);
  group->receive(0, {{0, 999}}, 0, in(20));
  trainer.stream_wait();
  trainer.comm->check();
  cards.downloads_fail = true;
  expect(failure_of([&] { group->read(0, 0, 999, in(20)); }, GroupErrorKind::kBroken), {"reading", "the copy failed"});
  cards.downloads_fail = false;
  expect(failure_of([&] { group->read(0, 0, 999, in(20)); }, GroupErrorKind::kBroken), {"the copy failed"});
  CHECK_THROWS(trainer.comm->check(), NcclError);
  trainer.comm->abort();
  group->end();
  expect_none_left("a copy that fails");
}

void test_warm_up() {
  Engine engine(1);
  NcclGroupOptions options{2, 0};
  options.warm_up = true;
  auto group = engine.group(options);  // first, as TRL has it
  const auto id = nccl_group_id(library);
  Trainer trainer(id, 2, 1);
  std::thread joining([&] {
    trainer.join();
    trainer.barrier();
  });
  group->connect(id.data(), in(20));
  joining.join();
  trainer.stream_wait();
  CHECKF(trainer.sum() == 1, "the sum is %g", trainer.sum());
}

// Two engines of two ranks: one group for each, all at once, in another order on the other side.
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
        CHECK_THROWS(group->params(1 - rank, 0, in(5)), std::invalid_argument);
        group->params(rank, 0, in(20));
        group->stage(10);
        CHECK_THROWS(group->staged(0), std::invalid_argument);
        group->barrier(in(20));
        group->end();  // in order: who is left would hear of an abort
      });
    }
  }
  for (auto& thread : all) thread.join();
  CHECK(sender.params == receiver.params);
}

// Parameters of [4, 8] bfloat16 (64 bytes), one behind the other but for the last; tensors of the same shape, in the
// same order.
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
    host.open = [](int rank) { return std::make_unique<LoopCard>(rank, cards); };
    host.params = [&](int rank) {
      if (released) throw std::runtime_error("released");
      std::vector<GroupSpan> out;
      for (size_t i = 0; i < kParams; i++) {
        uint8_t* const begin = weights[static_cast<size_t>(rank)].data();
        out.push_back({begin + i * kParam + (i + 1 == kParams ? kGap : 0), kParam, 16});
      }
      return out;
    };
    host.lose = [](const std::string& message) { losses.push_back(message); };
    return std::make_unique<CardGroup>(std::move(host), options);
  };
  std::vector<Tensor> tensors;
  std::vector<Rect> rects;
  for (int i = 0; i < static_cast<int>(kParams); i++) {
    tensors.push_back({0, static_cast<uint64_t>(i) * kParam, DType::kBFloat16, 4, 8, 16, 2});
    for (int rank = 0; rank < ranks; rank++) rects.push_back({i, rank, i, 0, 0, 4, 8, 0, 0});
  }
  auto group = make();
  CHECK((group->places({{0, 3 * kParam}, {3 * kParam, kParam}, {0, 4 * kParam}, {64, 0}}, tensors, rects) ==
         std::vector<uint64_t>{0, 3 * kParam + kGap, kNoPlace, 0}));
  std::vector<Rect> one = rects;
  if (ranks > 1) {
    std::erase_if(one, [&](const Rect& rect) { return rect.rank == ranks - 1 && rect.tensor == 1; });
    CHECK((group->places({{0, kParam}, {kParam, kParam}}, tensors, one) == std::vector<uint64_t>{0, kNoPlace}));
    options = {2, 1};
    options.core_rank = 1;
    CHECK((make()->places({{0, kParam}}, tensors, rects) == std::vector<uint64_t>{kNoPlace}));
  }
  released = true;
  CHECK_THROWS(group->places({{0, kParam}}, tensors, rects), std::runtime_error);
  released = false;

  CHECK_THROWS(group->receive_in_place({{0, 1}}, 0, in(5)), std::invalid_argument);  // not connected
  const auto id = nccl_group_id(library);
  Trainer trainer(id, ranks + 1, 0);
  std::thread joining([&] { trainer.join(); });
  group->connect(id.data(), in(20));
  joining.join();
  const int64_t held = cards.bytes;
  // Past the weights, into the gap, from a rank of ours: nothing is called, and the group goes on.
  const std::vector<GroupPart> wrong{
      {4 * kParam, kParam + 1}, {3 * kParam - 1, 2}, {3 * kParam, 1}, {UINT64_MAX, 2}, {4 * kParam + kGap, 1}};
  for (const GroupPart& part : wrong) {
    CHECK_THROWS(group->receive_in_place({{0, 1}, part}, 0, in(5)), std::invalid_argument);
  }
  CHECK_THROWS(group->receive_in_place({{0, 1}}, 1, in(5)), std::invalid_argument);
  const std::vector<uint8_t> first = coded(1, 3 * kParam), last = coded(2, kParam);
  std::thread sending([&] {
    trainer.broadcast(first);
    trainer.broadcast(last);
  });
  group->receive_in_place({{0, 3 * kParam}, {5, 0}, {3 * kParam + kGap, kParam}}, 0, in(20));
  sending.join();
  trainer.stream_wait();
  std::vector<uint8_t> expected = first;
  expected.insert(expected.end(), kGap, 0xee);
  expected.insert(expected.end(), last.begin(), last.end());
  for (const auto& rank : weights) CHECK(rank == expected);
  CHECKF(cards.bytes == held, "%lld bytes were staged", static_cast<long long>(cards.bytes - held));
  // It stops between two broadcasts: the first is there, and the group is of no use.
  const std::vector<uint8_t> again = coded(3, kParam);
  trainer.broadcast(again);
  expect(failure_of(
             [&] {
               group->receive_in_place({{0, kParam}, {kParam, kParam}}, 0, in(0.4));
             },
             GroupErrorKind::kTimeout),
         {"receiving", "broadcast 2 of 2: not done after"});
  for (const auto& rank : weights) {
    CHECK(std::memcmp(rank.data(), again.data(), kParam) == 0);
    CHECK(std::memcmp(rank.data() + kParam, first.data() + kParam, 2 * kParam) == 0);
  }
  expect(failure_of([&] { group->receive_in_place({{0, 1}}, 0, in(5)); }, GroupErrorKind::kBroken), {"of no use"});
  trainer.comm->abort();
}

void test_refused() {
  Engine engine(2);
  expect(failure_of(
             [&] {
               engine.group({2, 1});
             },
             GroupErrorKind::kRefused),
         {"ranks 1 to 2 do not fit into a group of 2", "rank_offset"});
  NcclGroupOptions wrong{3, 1};
  wrong.core_rank = 2;
  expect(failure_of([&] { engine.group(wrong); }, GroupErrorKind::kRefused), {"rank 2 does not exist"});
  const std::string kept = library;
  library = "/nowhere/libnccl.so.2";
  expect(failure_of(
             [&] {
               engine.group({3, 1});
             },
             GroupErrorKind::kRefused),
         {"trainer's torch", "/nowhere/libnccl.so.2"});
  expect(failure_of([&] { nccl_group_id(library); }, GroupErrorKind::kRefused), {"/nowhere/libnccl.so.2"});
  library = kept;

  const std::vector<std::string> same{"GPU-0a", "GPU-0A"}, two{"GPU-0a", "GPU-0b"};
  NcclGroupOptions options{3, 1};
  expect(failure_of([&] { check_group_cards(same, options); }, GroupErrorKind::kRefused),
         {"rank 1 and rank 0 share GPU-0A", "/update_weights_from_tensor"});
  options.core_rank = 1;
  check_group_cards(same, options);
  options.core_rank = -1;
  options.peer_cards = {"GPU-0c", "0B"};
  expect(failure_of([&] { check_group_cards(two, options); }, GroupErrorKind::kRefused),
         {"rank 1 and the trainer share GPU-0b: use /update_weights_from_tensor"});

  // What NCCL says once ranks have met.
  for (const auto& [said, cure] :
       {std::pair{"Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 3b000",
                  "/update_weights_from_tensor"},
        std::pair{"Mismatched NCCL version detected : rank 0 version 22703 rank 1 version 22809", "--nccl-path"}}) {
    control->join_fails = said;
    auto group = engine.group({3, 1});
    expect(failure_of([&] { group->connect(nccl_group_id(library).data(), in(5)); }, GroupErrorKind::kRefused),
           {said, cure, "NCCL group of 3 (ranks 1-2 here), connecting by NCCL 2.28.9, ", "loop card"});
    control->join_fails = nullptr;
  }
  expect(failure_of(
             [] {
               class Cpu : public Device {
                 DeviceInfo info() const override { return {}; }
                 const void* address(int, int) const override { return nullptr; }
                 void step(const StepBatch&, StepResult&) override {}
                 WriteOutcome write(const WriteJob&) override { return {}; }
                 void read(int, int, int64_t, int64_t, int64_t, int64_t, uint8_t*) override {}
                 std::vector<uint64_t> checksum(const std::vector<Rect>&, const std::vector<int64_t>&) override {
                   return {};
                 }
                 void scramble(uint64_t) override {}
                 uint64_t release_memory(uint32_t, bool) override { return 0; }
                 bool resume_memory(uint32_t) override { return false; }
               } cpu;
               static_cast<Device&>(cpu).nccl_group({});
             },
             GroupErrorKind::kRefused),
         {"gloo"});
}

// Whatever the other side does not do ends in time, and a new group works at once.
void test_never(bool deaf) {
  control->deaf = deaf ? 1 : 0;
  Engine engine(2);
  const auto id = nccl_group_id(library);
  {
    // Nobody comes.
    auto group = engine.group({3, 1});
    const auto began = Clock::now();
    expect(failure_of([&] { group->connect(id.data(), in(0.3)); }, GroupErrorKind::kTimeout),
           {"connecting", "rank ", "of 3, joining the communicator: not done after 0."});
    CHECKF(since(began) >= 0.25 && since(began) < 10, "%g s", since(began));
    expect(failure_of([&] { group->barrier(in(5)); }, GroupErrorKind::kBroken), {"of no use", "not done after"});
    expect(failure_of([&] { group->connect(id.data(), in(5)); }, GroupErrorKind::kBroken), {"not done after"});
  }
  {
    auto group = engine.group({3, 1});
    expect(failure_of([&] { group->connect(id.data(), in(-1)); }, GroupErrorKind::kTimeout), {"has passed"});
  }
  CHECK(control->live == 0);
  const auto joined = [&](Trainer& trainer, const std::vector<uint8_t>& unique) {
    auto group = engine.group({3, 1});
    std::thread joining([&] { trainer.join(); });
    group->connect(unique.data(), in(20));
    joining.join();
    group->stage(10000);
    return group;
  };
  {
    // It stops in the middle of the second broadcast of three.
    const auto unique = nccl_group_id(library);
    Trainer trainer(unique, 3, 0);
    auto group = joined(trainer, unique);
    const auto data = coded(1, 3000);
    trainer.broadcast(data);
    const auto began = Clock::now();
    const std::string said = failure_of(
        [&] {
          group->receive(0, {{0, 3000}, {3072, 3000}, {6144, 3000}}, 0, in(0.4));
        },
        GroupErrorKind::kTimeout);
    expect(said, {"NCCL group of 3 (ranks 1-2 here), receiving, rank ",
                  "receiving from rank 0, broadcast 2 of 3: not done after 0."});
    CHECKF(since(began) < 10, "%g s", since(began));
    CHECKF(control->live == 1, "%d: ours were not aborted", control->live);
    trainer.comm->abort();
  }
  {
    // Other bytes than announced.
    const auto unique = nccl_group_id(library);
    Trainer trainer(unique, 3, 0);
    auto group = joined(trainer, unique);
    const auto data = coded(1, 3000);
    trainer.broadcast(data);
    expect(failure_of(
               [&] {
                 group->receive(0, {{0, 3001}}, 0, in(0.4));
               },
               GroupErrorKind::kTimeout),
           {"broadcast 1 of 1"});
    trainer.comm->abort();
  }
  {
    // It dies: told by NCCL, or by the deadline alone.
    const auto unique = nccl_group_id(library);
    Trainer trainer(unique, 3, 0);
    auto group = joined(trainer, unique);
    std::thread dying([&] {
      sleep_ms(100);
      trainer.comm->abort();
    });
    const auto began = Clock::now();
    const std::string said = failure_of(
        [&] {
          group->receive(1, {{0, 100}}, 0, in(deaf ? 0.5 : 20));
        },
        deaf ? GroupErrorKind::kTimeout : GroupErrorKind::kBroken);
    if (!deaf) expect(said, {"remote process exited"});
    CHECKF(since(began) < 10, "%g s", since(began));
    dying.join();
  }
  {
    // Somebody gives up, from another thread, in every wait.
    for (int where = 0; where < 3; where++) {
      const auto unique = nccl_group_id(library);
      Trainer trainer(unique, 3, 0);
      std::unique_ptr<CardGroup> group = where == 0 ? engine.group({3, 1}) : joined(trainer, unique);
      std::thread other([&] {
        sleep_ms(100);
        group->abort("the group was destroyed");
      });
      const auto began = Clock::now();
      const std::string said = failure_of(
          [&] {
            if (where == 0) group->connect(unique.data(), in(60));
            if (where == 1) group->receive(0, {{0, 5}}, 0, in(60));
            if (where == 2) group->barrier(in(60));
          },
          GroupErrorKind::kBroken);
      expect(said, {"the group was destroyed"});
      CHECKF(since(began) < 10, "%g s", since(began));
      other.join();
      expect(failure_of([&] { group->barrier(in(5)); }, GroupErrorKind::kBroken), {"the group was destroyed"});
      group->end();
      if (trainer.comm) trainer.comm->abort();
    }
  }
  control->deaf = 0;
  // No memory for it: said as such, and all of it is given back.
  cards.room = 512;
  auto group = engine.group({3, 1});
  CHECK_THROWS(group->connect(id.data(), in(5)), NoMemory);
  cards.room = int64_t{1} << 40;
}

void test_rounds() {
  const size_t before = threads();
  for (int round = 0; round < 40; round++) {
    Engine engine(2);
    auto group = engine.group({3, 1});
    const auto id = nccl_group_id(library);
    Trainer trainer(id, 3, 0);
    std::thread joining([&] { trainer.join(); });
    group->connect(id.data(), in(20));
    joining.join();
    group->stage(1 << 16);
    const auto data = coded(static_cast<uint64_t>(round), 1 << 16);
    trainer.broadcast(data);
    group->receive(round % 2, {{0, 1 << 16}}, 0, in(20));
    CHECK(std::memcmp(group->staged(round % 2).source.of(1), data.data(), data.size()) == 0);
    if (round % 4 == 1) group->abort("enough");
    if (round % 4 != 3) group->end();
    trainer.stream_wait();
  }
  expect_none_left("rounds");
  // Threads of aborts before the rounds may have ended since; one that has been joined may be listed a little longer.
  for (const auto began = Clock::now(); threads() > before && since(began) < 10;) sleep_ms(10);
  CHECKF(threads() <= before, "%zu threads, %zu before", threads(), before);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  library = argv[1];
  const unsigned seed = argc > 2 ? static_cast<unsigned>(std::strtoul(argv[2], nullptr, 10)) : 1;
  void* const handle = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return 3;
  control = static_cast<LoopControl*>(dlsym(handle, "loop_control"));
  for (const auto& [ranks, size] : {std::pair{1, 2}, {1, 4}, {2, 3}, {3, 5}}) {
    test_receive(ranks, size, seed);
    expect_none_left("receive");
  }
  test_exchange();
  expect_none_left("exchange");
  test_a_copy_that_fails();
  test_warm_up();
  expect_none_left("warm-up");
  test_params();
  expect_none_left("parameters");
  for (const int ranks : {1, 2}) {
    test_in_place(ranks);
    expect_none_left("in place");
  }
  test_refused();
  expect_none_left("refused");
  for (const bool deaf : {false, true}) {
    test_never(deaf);
    expect_none_left("never");
  }
  test_rounds();
  return refit::test::finish("group_life");
}
