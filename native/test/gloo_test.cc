// The gloo transport between groups of this process: data, order and leaks. test/interop/test_gloo.py
// tests it against torch's gloo.
#include "test/gloo_world.h"

namespace refit::test {
namespace {

void test_tree() {
  for (int size = 1; size <= 33; size++) {
    for (int root = 0; root < size; root++) {
      std::vector<int> parents(size, -1);
      for (int rank = 0; rank < size; rank++) {
        for (const int child : gloo::tree_place(rank, root, size).children) {
          CHECK(parents[child] == -1);
          parents[child] = rank;
        }
      }
      for (int rank = 0; rank < size; rank++) {
        const auto parent = gloo::tree_place(rank, root, size).parent;
        CHECK(parent.value_or(-1) == parents[rank]);
        CHECK((rank == root) == !parent);
        const int depth = gloo::tree_depth(rank, root, size);
        CHECK(rank == root ? depth == 0 : depth == gloo::tree_depth(parents[rank], root, size) + 1);
      }
    }
  }
  // The distance doubles, as in gloo's broadcast.cc.
  CHECK((gloo::tree_place(0, 0, 5).children == std::vector<int>{1, 2, 4}));
  CHECK((gloo::tree_place(1, 0, 5).children == std::vector<int>{3}));
  CHECK((gloo::tree_place(2, 2, 4).children == std::vector<int>{3, 0}));
  CHECK(gloo::make_slot(gloo::kBroadcast, 17) == 0x0600000011000000u);
  CHECK(gloo::slot_name(0x0700000003000000u) == "barrier 3");
  CHECK(gloo::slot_name(0x0400000003000000u) == "allreduce 3");
  CHECK(gloo::tag_of(gloo::make_slot(gloo::kBroadcast, 0xfffffffeu)) == 0xfffffffeu);
}

// The value that torch 2.13 put into its store for rank 0 of 2, on a machine named vm (the rest of its sockaddr is
// uninitialised stack memory).
const char* const kTorchValue =
    "0200000000000000766d8800000000000000020091"
    "2b7f0000010000000000000000108301"
    "3abe7f0000512abaa800000000"
    "0826a039be7f00006834a039be7f0000f43c9e2afd7f00001ab1023abe7f0000470400000000000050f1a039be7f000010"
    "83013abe7f0000001bc053bae4a53400000000000000000080ffffffffffffff7300000000000000";

void test_addresses() {
  gloo::Address address;
  address.host = "trainer-0";
  address.socket = gloo::parse_host("10.1.2.3");
  address.socket[3] = 80;
  for (int i = 0; i < 3; i++) address.identifiers.push_back(i * 1000 - 1);
  const Bytes value = gloo::encode(address);
  CHECK(value.size() == 8 + 9 + 8 + 136 + 3 * 8);
  const gloo::Address back = gloo::decode(value, 1, 3);
  CHECK(back.host == address.host && back.socket == address.socket && back.identifiers == address.identifiers);
  CHECK(gloo::text(back.socket) == "10.1.2.3:80");
  CHECK(!back.lazy());
  const gloo::Address six{"", gloo::parse_host("fd00::7"), {}};
  CHECK(gloo::text(gloo::decode(gloo::encode(six), 0, 2).socket) == "[fd00::7]:0");
  CHECK(gloo::decode(gloo::encode(six), 0, 2).lazy());
  CHECK(gloo::is_loopback(gloo::parse_host("127.3.0.1")) && gloo::is_loopback(gloo::parse_host("::1")));
  CHECK(!gloo::is_loopback(gloo::parse_host("10.0.0.1")) && !gloo::is_loopback(six.socket));

  Bytes torch;
  for (const char* at = kTorchValue; *at != 0; at += 2) {
    torch.push_back(static_cast<uint8_t>(std::stoi(std::string(at, 2), nullptr, 16)));
  }
  // The value up to the end of the sockaddr, then -1, and the identifiers 0 and 1.
  torch.resize(8 + 2 + 8 + 128);
  for (const int64_t number : {int64_t{-1}, int64_t{0}, int64_t{1}}) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(&number);
    torch.insert(torch.end(), bytes, bytes + 8);
  }
  const gloo::Address theirs = gloo::decode(torch, 0, 2);
  CHECK(theirs.host == "vm" && gloo::text(theirs.socket) == "127.0.0.1:37163");
  CHECK((theirs.identifiers == std::vector<int64_t>{0, 1}));

  // Every other value is refused with a reason, and never read beyond its end.
  for (size_t length = 0; length < value.size(); length++) {
    if (length == value.size() - 24) continue;  // without identifiers: a lazy rank
    const Thrown thrown = thrown_by([&] { gloo::decode(Bytes(value.begin(), value.begin() + length), 4, 3); });
    CHECKF(thrown.any && thrown.says("rank 4"), "%zu bytes: \"%s\"", length, thrown.message.c_str());
  }
  std::mt19937 random(7);
  for (int round = 0; round < 2000; round++) {
    Bytes wrong = value;
    for (int i = 0; i < 3; i++) wrong[random() % 30] = static_cast<uint8_t>(random());
    thrown_by([&] { gloo::decode(wrong, 0, 3); });
  }
  CHECK_THROWN(thrown_by([&] { gloo::decode(Bytes(136 * 2), 0, 3); }), GroupErrorKind::kRefused, "before torch 2.1");
  CHECK_THROWN(thrown_by([&] { gloo::decode(value, 0, 4); }), GroupErrorKind::kRefused, "another size");

  // Exactly one of two connects; gloo compares the port's bytes in memory order.
  for (int round = 0; round < 2000; round++) {
    gloo::Address a{"", gloo::parse_host("10.0.0.1"), {}}, b = a;
    for (const size_t at : {2, 3, 4, 7}) {
      a.socket[at] = static_cast<uint8_t>(random() % 3);
      b.socket[at] = static_cast<uint8_t>(random() % 3);
    }
    if (a.socket == b.socket) continue;
    CHECK(gloo::connects(a, b) != gloo::connects(b, a));
  }
  gloo::Address low{"", gloo::parse_host("10.0.0.1"), {}}, high = low;
  low.socket[2] = 1, low.socket[3] = 0;    // port 256
  high.socket[2] = 0, high.socket[3] = 1;  // port 1, but greater in memory
  CHECK(gloo::connects(high, low) && !gloo::connects(low, high));

  CHECK_THROWS(GlooGroup(2, {0}, "localhost"), std::invalid_argument);
  CHECK_THROWS(GlooGroup(2, {2}, kHost), std::invalid_argument);
  CHECK_THROWS(GlooGroup(2, {1, 1}, kHost), std::invalid_argument);
  CHECK_THROWS(GlooGroup(2, {}, kHost), std::invalid_argument);
  CHECK_THROWN(thrown_by([] { GlooGroup(2, {0}, "192.0.2.1"); }), GroupErrorKind::kRefused, "not an address of this");
}

// Any number of groups, any root, any sizes: every group gets the root's bytes, and no byte around them changes.
void test_worlds() {
  std::mt19937 random(1);
  for (int round = 0; round < 24; round++) {
    const int size = 2 + round % 4;
    World world(size, random_parts(size, random), round % 3 == 2);
    constexpr uint64_t kSlot = 3 << 20;
    world.each([](GlooGroup& group, int) { group.stage(kSlot); });
    for (int step = 0; step < 6; step++) {
      const int slot = step % 2;
      // send() always sends from the first rank of a group.
      const int sender = static_cast<int>(random() % world.groups.size());
      const int root =
          static_cast<int>(std::find(world.owner.begin(), world.owner.end(), sender) - world.owner.begin());
      const size_t count = step == 0 ? 150 : 1 + random() % 5;
      std::vector<GroupPart> parts;
      uint64_t at = random() % 64;
      for (size_t i = 0; i < count; i++) {
        const uint64_t most = i == 0 ? 1000000 : 10000;
        const uint64_t bytes = random() % 4 == 0 ? 0 : random() % most;
        parts.push_back({at, bytes});
        at += bytes + 1 + random() % 64;
      }
      const uint64_t seed = random();
      const auto barrier = random() % 2 == 0;
      world.each([&](GlooGroup& group, int g) {
        if (g == sender) {
          for (size_t i = 0; i < count; i++) {
            const Bytes bytes = coded_bytes(seed + i, parts[i].bytes);
            group.send(bytes.data(), bytes.size(), late());
          }
        } else {
          auto* const memory = const_cast<uint8_t*>(group.staged(slot).source.data);
          std::memset(memory, 0xee, kSlot);
          group.receive(slot, parts, root, late());
          uint64_t wrong = 0, from = 0;
          for (size_t i = 0; i < count; i++) {
            for (; from < parts[i].offset; from++) wrong += memory[from] != 0xee;
            for (uint64_t k = 0; k < parts[i].bytes; k++) wrong += memory[from++] != coded(seed + i, k);
          }
          for (; from < kSlot; from++) wrong += memory[from] != 0xee;
          CHECKF(wrong == 0, "world of %d, round %d, step %d: %zu bytes are wrong", size, round, step,
                 static_cast<size_t>(wrong));
        }
        if (barrier) group.barrier(late());
      });
    }
    world.each([](GlooGroup& group, int) { group.end(); });
  }
}

// No rank passes before the last one has arrived.
void test_barrier() {
  std::mt19937 random(3);
  for (int size = 2; size <= 9; size++) {
    World world(size, random_parts(size, random));
    for (int round = 0; round < 3; round++) {
      std::atomic<int> come{0};
      const int last = static_cast<int>(random() % world.groups.size());
      world.each([&](GlooGroup& group, int g) {
        if (g == last) std::this_thread::sleep_for(20ms);
        come++;
        group.barrier(late());
        CHECK(come == static_cast<int>(world.groups.size()));
      });
    }
  }
}

// A rank that has finished may leave while the others are still busy.
void test_early_leaver() {
  for (int round = 0; round < 5; round++) {
    World world(3, {{0}, {1}, {2}});
    const Bytes bytes = coded_bytes(9, 4 << 20);
    world.each([&](GlooGroup& group, int g) {
      if (g == 0) {
        group.send(bytes.data(), bytes.size(), late());
      } else {
        if (g == 2) std::this_thread::sleep_for(10ms);
        group.stage(bytes.size());
        group.receive(0, {{0, bytes.size()}}, 0, late());
        CHECK(std::memcmp(group.staged(0).source.data, bytes.data(), bytes.size()) == 0);
      }
      group.end();
    });
  }
}

void test_staging() {
  World world(2, {{0}, {1}});
  GlooGroup& group = *world.groups[1];
  CHECK_THROWS(group.staged(0), std::invalid_argument);
  group.stage(4096);
  const StagedSlot held = group.staged(1);
  CHECK(held.source.bytes == 4096 && held.source.fd == -1 && held.source.data != group.staged(0).source.data);
  CHECK_THROWS(group.receive(0, {{0, 4097}}, 0, late()), std::invalid_argument);
  CHECK_THROWS(group.receive(0, {{4096, 1}}, 0, late()), std::invalid_argument);
  CHECK_THROWS(group.receive(0, {{~uint64_t{0}, 2}}, 0, late()), std::invalid_argument);
  CHECK_THROWS(group.receive(0, {}, 1, late()), std::invalid_argument);
  CHECK_THROWS(group.receive(0, {}, 2, late()), std::invalid_argument);
  group.stage(1 << 20);
  CHECK(group.staged(1).source.bytes == 1 << 20);
  group.stage(1 << 20, 1);
  CHECK(group.staged(0).source.bytes == 1 << 20);
  CHECK_THROWS(group.staged(1), std::invalid_argument);
  CHECK_THROWS(group.receive(1, {{0, 1}}, 0, late()), std::invalid_argument);
  group.stage(1 << 20, 2);
  CHECK(group.staged(1).source.bytes == 1 << 20);
  group.stage(0);
  CHECK_THROWS(group.staged(0), std::invalid_argument);
  // A write that reads the slot keeps its memory.
  const_cast<uint8_t*>(held.source.data)[4095] = 1;
  CHECK_THROWS(group.stage(uint64_t{1} << 60), NoMemory);
  CHECK_THROWS(group.staged(0), std::invalid_argument);
  // The refused calls have sent nothing.
  const Bytes bytes = coded_bytes(1, 100);
  world.each([&](GlooGroup& one, int g) {
    one.stage(100);
    if (g == 0) one.send(bytes.data(), bytes.size(), late());
    if (g == 1) one.receive(1, {{0, 100}}, 0, late());
  });
  CHECK(std::memcmp(group.staged(1).source.data, bytes.data(), 100) == 0);
  CHECK(group.read(1, 0, 100, late()) == bytes);
  CHECK(group.read(1, 7, 90, late()) == Bytes(bytes.begin() + 7, bytes.begin() + 97));
  CHECK(group.read(1, 100, 0, late()).empty());
  CHECK_THROWS(group.read(1, 0, 101, late()), std::invalid_argument);
  CHECK_THROWS(group.read(1, ~uint64_t{0}, 2, late()), std::invalid_argument);
}

void run() {
  leaves_nothing([] {
    test_tree();
    test_addresses();
    test_worlds();
    test_barrier();
    test_early_leaver();
    test_staging();
  });
}

}  // namespace
}  // namespace refit::test

int main() {
  refit::test::run();
  return refit::test::finish("gloo_test");
}
