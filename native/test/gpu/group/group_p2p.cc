// Messages of single ranks (ncclSend to ncclRecv) into slots and into the weights.
#include "cuda/group/group_library.h"
#include "test/gpu/group/group_world.h"

namespace refit::test {
namespace {

constexpr uint64_t kSlot = 1000;

// Two trainers, which are ranks 0 and 1, and an engine behind them.
struct Meeting {
  explicit Meeting(int ranks)
      : engine(ranks), id(nccl_group_id(library)), first(id, ranks + 2, 0), second(id, ranks + 2, 1) {
    for (auto& params : engine.params) params = {coded(1, 500), coded(2, 64), coded(3, 900)};
    group = engine.group({ranks + 2, 2});
    std::thread joining[] = {std::thread([&] { first.join(); }), std::thread([&] { second.join(); })};
    group->connect(id.data(), in(20));
    for (auto& thread : joining) thread.join();
    group->stage(kSlot);
  }
  ~Meeting() {
    group->end();
    first.comm->abort();
    second.comm->abort();
  }

  Engine engine;
  const std::vector<uint8_t> id;
  Trainer first, second;
  std::unique_ptr<GpuGroup> group;
};

// As torch's batch_isend_irecv does. Returns when all of it has been received.
void send(Trainer& from, const std::vector<std::pair<int, std::vector<uint8_t>>>& messages) {
  from.comm->group([&] {
    for (const auto& [to, data] : messages) from.comm->send(data.data(), data.size(), kNcclUint8, to, from.stream());
  });
  from.stream_wait();
}

bool holds(const uint8_t* at, const std::vector<uint8_t>& data) {
  return std::memcmp(at, data.data(), data.size()) == 0;
}

void test_places(int ranks) {
  Meeting m(ranks);
  const int last = ranks + 1;  // the engine's last rank
  auto& params = m.engine.params.back();
  for (int round = 0; round < 12; round++) {
    const auto number = static_cast<uint64_t>(round) * 10;
    const auto a = coded(number, 100), b = coded(number + 1, 500 - static_cast<uint64_t>(round)),
               c = coded(number + 2, 77);
    const auto d = coded(number + 3, 64);
    const auto before = m.engine.params;
    // Each round's messages of rank 0 to a rank come in this order, whatever order the ranks have.
    const int slot = round % 2;
    m.group->begin_messages(
        slot,
        {{last, 1, -1, 300, c.size()}, {last, 0, -1, 9, a.size()}, {last, 0, 2, 10, b.size()}, {2, 1, 1, 0, d.size()}},
        in(20));
    std::vector<std::pair<int, std::vector<uint8_t>>> second{{2, d}, {last, c}};
    if (last == 2) std::swap(second[0], second[1]);
    if (round % 3 == 0) sleep_ms(20);
    std::thread late([&] { send(m.second, second); });
    send(m.first, {{last, a}, {last, b}});
    m.group->arrive(in(20));
    late.join();
    const uint8_t* const staged = m.group->staged(slot).source.of(ranks - 1);
    CHECKF(holds(staged + 9, a) && holds(staged + 300, c), "round %d: the slot", round);
    CHECKF(holds(params[2].data() + 10, b), "round %d: a parameter", round);
    CHECKF(m.engine.params[0][1] == d, "round %d: a whole parameter", round);
    CHECK(params[0] == before.back()[0] && holds(before.back()[2].data(), {params[2].begin(), params[2].begin() + 10}));
    CHECK(std::equal(params[2].begin() + 10 + static_cast<int64_t>(b.size()), params[2].end(),
                     before.back()[2].begin() + 10 + static_cast<int64_t>(b.size())));
  }
}

// NCCL is not called, and the group still works.
void test_refused_messages() {
  Meeting m(2);
  const auto refused = [&](const NcclMessage& message, const char* why) {
    try {
      m.group->begin_messages(0, {{2, 0, -1, 0, 10}, message}, in(5));
      CHECK(!"no exception");
    } catch (const std::invalid_argument& error) {
      expect(error.what(), {"message 2 of 2", why});
    }
  };
  refused({1, 0, -1, 0, 10}, "goes to rank 1, which is not here");
  refused({4, 0, -1, 0, 10}, "goes to rank 4, which is not here");
  refused({2, 3, -1, 0, 10}, "comes from rank 3, which is no other rank");
  refused({2, 4, -1, 0, 10}, "comes from rank 4, which is no other rank");
  refused({2, 0, 3, 0, 10}, "goes to parameter 3 of 3");
  refused({2, 0, 1, 55, 10}, "does not fit into a parameter of 64");
  refused({2, 0, 1, UINT64_MAX, 10}, "does not fit into a parameter of 64");
  refused({2, 0, -1, kSlot - 9, 10}, "does not fit into a staging slot of 1000");
  const auto data = coded(4, 50);
  m.group->begin_messages(1, {{3, 1, -1, 0, 50}}, in(20));
  CHECK_THROWS(m.group->begin_messages(1, {{3, 1, -1, 0, 50}}, in(5)), std::invalid_argument);
  m.group->begin_messages(0, {}, in(20));
  send(m.second, {{3, data}});
  m.group->arrive(in(20));
  m.group->arrive(in(20));
  CHECK(holds(m.group->staged(1).source.of(1), data));
}

// The message names the ranks whose bytes are missing, and the second receive is given up with the first.
void test_missing_messages() {
  Meeting m(1);
  m.group->begin_messages(0, {{2, 0, -1, 0, 50}, {2, 1, -1, 50, 50}, {2, 1, 0, 0, 50}}, in(20));
  m.group->begin_messages(1, {{2, 0, -1, 0, 50}}, in(20));
  const auto data = coded(5, 50);
  send(m.first, {{2, data}});
  expect(failure_of([&] { m.group->arrive(in(0.4)); }, GroupErrorKind::kTimeout),
         {"receiving 3 messages of ranks 0, 1: not done after"});
  expect(failure_of([&] { m.group->arrive(in(5)); }, GroupErrorKind::kBroken), {"failed before"});
  CHECKF(control->live == 2, "%d communicators live", control->live);
}

// A sender that ends is noticed before the deadline; on links without a connection the deadline ends the wait. An abort
// ends it at once.
void test_broken_messages() {
  {
    Meeting m(2);
    m.group->begin_messages(0, {{2, 0, -1, 0, 50}, {3, 0, 1, 0, 50}}, in(20));
    std::thread ending([&] {
      sleep_ms(50);
      m.first.comm->abort();
    });
    const auto began = Clock::now();
    expect(failure_of([&] { m.group->arrive(in(20)); }, GroupErrorKind::kBroken), {"remote process exited"});
    CHECK(since(began) < 10);
    ending.join();
  }
  {
    Meeting m(1);
    control->deaf = 1;
    m.group->begin_messages(0, {{2, 0, -1, 0, 50}}, in(20));
    m.first.comm->abort();
    expect(failure_of([&] { m.group->arrive(in(0.4)); }, GroupErrorKind::kTimeout), {"1 message of rank 0"});
    control->deaf = 0;
  }
  {
    Meeting m(1);
    m.group->begin_messages(0, {{2, 1, 0, 0, 50}}, in(20));
    std::thread aborting([&] {
      sleep_ms(50);
      m.group->abort("no longer needed");
    });
    expect(failure_of([&] { m.group->arrive(in(20)); }, GroupErrorKind::kBroken), {"no longer needed"});
    aborting.join();
  }
}

}  // namespace

void test_messages() {
  for (const int ranks : {1, 2, 3}) {
    test_places(ranks);
    expect_none_left("messages");
  }
  test_refused_messages();
  expect_none_left("refused messages");
  test_missing_messages();
  expect_none_left("missing messages");
  test_broken_messages();
  expect_none_left("broken messages");
}

}  // namespace refit::test
