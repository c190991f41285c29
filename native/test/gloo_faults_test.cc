// gloo groups with ranks that break the protocol, never connect, abort or die.
#include "test/gloo_world.h"

namespace refit::test {
namespace {

void test_impostors() {
  const Bytes data = coded_bytes(1, 600);
  const uint64_t slot1 = gloo::make_slot(gloo::kBroadcast, 1);
  // A rank that follows the protocol. It announces the second piece first and sends its bytes in two parts.
  CHECK(!receive_from([&](Impostor& other) {
           const gloo::Header first = other.hear(), second = other.hear();
           CHECK(first.opcode == gloo::kRecvReady && first.slot == kSlot0 && first.length == 600 && first.bytes == 48);
           CHECK(second.slot == slot1 && second.length == 400);
           other.say(gloo::kSendReady, slot1, 400);
           other.say(gloo::kSendReady, kSlot0, 600);
           other.say(gloo::kSend, slot1, 400);
           other.write(data.data(), 150);
           std::this_thread::sleep_for(5ms);
           other.write(data.data(), 250);
           other.say(gloo::kSend, kSlot0, 600);
           other.write(data.data(), 600);
         }).any);

  const auto says = [](uint64_t opcode, uint64_t slot, uint64_t length) {
    return receive_from([=](Impostor& other) { other.say(opcode, slot, length); });
  };
  // Another number of bytes than expected. The sender can send them all before it gets the error.
  for (const uint64_t bytes : {uint64_t{599}, uint64_t{601}, uint64_t{1} << 20}) {
    const Thrown other = receive_from([&](Impostor& other) {
      other.say(gloo::kSendReady, kSlot0, bytes);
      other.say(gloo::kSend, kSlot0, bytes);
      const Bytes all(bytes);
      other.write(all.data(), bytes);
    });
    CHECK_THROWN(other, GroupErrorKind::kBroken,
                 "sends " + std::to_string(bytes) + " bytes in broadcast 0, expected 600");
  }
  CHECK_THROWN(receive_from([&](Impostor& other) { other.say(gloo::kSendReady, kSlot0, 601); }, 150ms),
               GroupErrorKind::kTimeout, ", which sends 601 bytes in broadcast 0, expected 600");
  CHECK_THROWN(says(gloo::kSend, kSlot0, ~uint64_t{0} - 47), GroupErrorKind::kBroken, "expected 600");
  CHECK_THROWN(says(gloo::kSendReady, gloo::make_slot(gloo::kBarrier, 0), 0), GroupErrorKind::kBroken,
               "is in barrier 0 where this side is in broadcast 0");
  CHECK_THROWN(says(gloo::kSendReady, uint64_t{4} << 56, 0), GroupErrorKind::kBroken, "is in allreduce 0");
  CHECK_THROWN(says(gloo::kRecvReady, kSlot0, 600), GroupErrorKind::kBroken, "do the two sides name the same root?");
  CHECK_THROWN(says(gloo::kSend, gloo::make_slot(gloo::kBroadcast, 7), 5), GroupErrorKind::kBroken,
               "is in broadcast 7");
  CHECK_THROWN(says(gloo::kSendToBuffer, kSlot0, 0), GroupErrorKind::kBroken, "no message of gloo's (opcode 0");
  CHECK_THROWN(says(0x474554202f2f2f2f, kSlot0, 0), GroupErrorKind::kBroken, "no message of gloo's");
  CHECK_THROWN(receive_from([](Impostor& other) { other.say(gloo::kSend, kSlot0, 600, 600); }), GroupErrorKind::kBroken,
               "no message of gloo's");
  CHECK_THROWN(receive_from([&](Impostor& other) {
                 other.say(gloo::kSend, slot1, 400);
                 other.write(data.data(), 400);
                 other.say(gloo::kSend, slot1, 400);
               }),
               GroupErrorKind::kBroken, "broadcast 1");
  CHECK_THROWN(receive_from([&](Impostor& other) {
                 other.say(gloo::kSendReady, gloo::make_slot(gloo::kBroadcast, 9), 1);
                 other.say(gloo::kSendReady, gloo::make_slot(gloo::kBroadcast, 9), 1);
               }),
               GroupErrorKind::kBroken, "announces broadcast 9 twice");

  // The connection ends in the middle of the data, in the middle of a header or at the start, or it hangs.
  const Thrown cut = receive_from([&](Impostor& other) {
    other.hear(), other.hear();
    other.say(gloo::kSendReady, kSlot0, 600);
    other.say(gloo::kSend, kSlot0, 600);
    other.write(data.data(), 250);
    std::this_thread::sleep_for(20ms);
    other.leave_softly();
  });
  CHECK_THROWN(cut, GroupErrorKind::kBroken, "250 of 600 bytes of broadcast 0 (part 1 of 2) had come");
  CHECK_THROWN(cut, GroupErrorKind::kBroken, "rank 0 at 127.0.0.1:");
  CHECK_THROWN(cut, GroupErrorKind::kBroken, "(impostor)");
  CHECK_THROWN(receive_from([&](Impostor& other) { other.write(data.data(), 20), other.leave(); }),
               GroupErrorKind::kBroken, "0 of 600 bytes");
  CHECK_THROWN(receive_from([&](Impostor& other) { other.leave(); }), GroupErrorKind::kBroken, "rank 0 at ");
  const Thrown stopped = receive_from(
      [&](Impostor& other) {
        other.say(gloo::kSend, kSlot0, 600);
        other.write(data.data(), 250);
      },
      150ms);
  CHECK_THROWN(stopped, GroupErrorKind::kTimeout, "the deadline has passed; 250 of 600 bytes of broadcast 0");
  CHECK_THROWN(stopped, GroupErrorKind::kTimeout, "from rank 0 at 127.0.0.1:");

  // The same for a receiver: it never reports that it is ready, announces another length, or leaves.
  for (const int kind : {0, 1, 2}) {
    GlooGroup group(2, {1}, kHost);
    Impostor impostor;
    std::thread other([&] {
      impostor.meet(group);
      if (kind == 1) impostor.say(gloo::kRecvReady, kSlot0, 5);
      if (kind == 2) {
        impostor.say(gloo::kRecvReady, kSlot0, 64 << 20);
        CHECK(impostor.hear().opcode == gloo::kSendReady);
        const gloo::Header header = impostor.hear();
        CHECK(header.opcode == gloo::kSend && header.bytes == (64 << 20) + 48);
        std::this_thread::sleep_for(20ms);
        impostor.leave();
      }
    });
    group.connect({impostor.value(), group.address(1)}, late());
    const Bytes bytes(64 << 20);
    const Thrown thrown = thrown_by([&] { group.send(bytes.data(), bytes.size(), within(kind == 0 ? 150ms : 20s)); });
    other.join();
    CHECK_THROWN(thrown, kind == 0 ? GroupErrorKind::kTimeout : GroupErrorKind::kBroken,
                 kind == 0   ? "0 of 67108864 bytes of broadcast 0 (part 1 of 1) had gone to rank 0"
                 : kind == 1 ? "waits for 5 bytes in broadcast 0, expected 67108864"
                             : "ended, or broke its connection off");
  }
}

void test_connecting() {
  const int descriptors = entries("/proc/self/fd");
  {
    // No other rank connects. The port numbers decide which side connects.
    GlooGroup group(3, {1}, kHost), other(3, {0}, kHost), third(3, {2}, kHost);
    const Thrown thrown = thrown_by([&] {
      group.connect({other.address(0), group.address(1), third.address(2)}, within(100ms));
      // The system accepts the connections to the other ranks.
    });
    if (thrown.any) CHECK_THROWN(thrown, GroupErrorKind::kTimeout, "it connects to this side");
  }
  {
    // Its process has ended.
    Bytes gone;
    GlooGroup group(2, {1}, kHost);
    for (bool connects = false; !connects;) {
      GlooGroup other(2, {0}, kHost);
      gone = other.address(0);
      connects = gloo::connects(gloo::decode(group.address(1), 1, 2), gloo::decode(gone, 0, 2));
      other.end();
    }
    const Thrown thrown = thrown_by([&] { group.connect({gone, group.address(1)}, late()); });
    CHECK_THROWN(thrown, GroupErrorKind::kBroken, "cannot be connected to: Connection refused (4 tries)");
  }
  {
    GlooGroup group(2, {1}, kHost);
    CHECK_THROWN(thrown_by([&] {
                   group.connect({Bytes(10), group.address(1)}, late());
                 }),
                 GroupErrorKind::kRefused, "rank 0");
    CHECK_THROWS(group.connect({group.address(1)}, late()), std::invalid_argument);
    const gloo::Address six{"", gloo::parse_host("::1"), {}};
    CHECK_THROWN(thrown_by([&] {
                   group.connect({gloo::encode(six), group.address(1)}, late());
                 }),
                 GroupErrorKind::kRefused, "IPv4 or IPv6");
    CHECK_THROWS(group.barrier(late()), std::invalid_argument);
  }
  {
    // Other programs connect and send nothing, nonsense, or a rank that does not connect here. This changes nothing.
    GlooGroup one(2, {0}, kHost), two(2, {1}, kHost);
    std::vector<gloo::Fd> strangers;
    for (const int64_t number :
         {int64_t{-1}, int64_t{0}, int64_t{1}, int64_t{2}, int64_t{1} << 40, int64_t{-1} << 60}) {
      for (GlooGroup* group : {&one, &two}) {
        const gloo::Address address = gloo::decode(group->address(group == &one ? 0 : 1), 0, 2);
        gloo::Fd& fd = strangers.emplace_back();
        CHECK(gloo::begin_connect(address.socket, fd) == 0);
        pollfd ready{fd.get(), POLLOUT, 0};
        poll(&ready, 1, 1000);
        // The right rank number would be accepted, because this protocol has no secret.
        if (number == 0 || number == 1) {
          CHECK(send(fd.get(), &number, 5, MSG_NOSIGNAL) == 5);
        } else {
          CHECK(send(fd.get(), &number, 8, MSG_NOSIGNAL) == 8);
        }
      }
    }
    const std::vector<Bytes> peers = {one.address(0), two.address(1)};
    std::thread other([&] { CHECK(!thrown_by([&] { one.connect(peers, late()); }).any); });
    CHECK(!thrown_by([&] { two.connect(peers, late()); }).any);
    other.join();
    other = std::thread([&] { CHECK(!thrown_by([&] { one.barrier(late()); }).any); });
    CHECK(!thrown_by([&] { two.barrier(late()); }).any);
    other.join();
  }
  CHECK(entries("/proc/self/fd") == descriptors);
}

void test_abort() {
  // Another thread aborts in the middle of a wait. The wait ends at once, with the reason.
  World world(2, {{0}, {1}});
  GlooGroup& group = *world.groups[1];
  group.stage(100);
  auto received = std::async(std::launch::async, [&] {
    return thrown_by([&] { group.receive(0, {{0, 100}}, 0, late()); });
  });
  std::this_thread::sleep_for(30ms);
  group.abort("the operator wished it");
  CHECK(received.wait_for(10s) == std::future_status::ready);
  CHECK_THROWN(received.get(), GroupErrorKind::kBroken, "the operator wished it");
  CHECK_THROWN(thrown_by([&] { group.barrier(late()); }), GroupErrorKind::kBroken, "the operator wished it");
  // The other side notices it before its own deadline.
  const Bytes bytes(100);
  CHECK_THROWN(thrown_by([&] { world.groups[0]->send(bytes.data(), bytes.size(), late()); }), GroupErrorKind::kBroken,
               "rank 1 at ");
  // An abort before the group is connected, a second abort, and an abort at the end.
  GlooGroup alone(2, {0}, kHost);
  alone.abort("first");
  alone.abort("second");
  const Thrown thrown = thrown_by([&] { alone.connect({alone.address(0), group.address(1)}, late()); });
  CHECK_THROWN(thrown, GroupErrorKind::kBroken, "first");
  alone.end();
  alone.abort("third");
}

// All ranks that wait for a dead rank get an error that names it, and no others.
void test_death_in_the_tree() {
  World world(4, {{0}, {1}, {2}, {3}});
  const Bytes bytes(32 << 20);
  // Rank 3 receives from rank 1, which never begins.
  world.each([&](GlooGroup& group, int g) {
    if (g == 0) {
      CHECK_THROWN(thrown_by([&] { group.send(bytes.data(), bytes.size(), within(20s)); }), GroupErrorKind::kBroken,
                   "rank 1 at ");
    } else if (g == 1) {
      std::this_thread::sleep_for(50ms);
      group.abort("crash");
      group.end();
    } else {
      group.stage(bytes.size());
      const Thrown thrown = thrown_by([&] { group.receive(0, {{0, bytes.size()}}, 0, within(20s)); });
      if (g == 3) CHECK_THROWN(thrown, GroupErrorKind::kBroken, "rank 1 at ");
      if (g == 2 && thrown.any) CHECK_THROWN(thrown, GroupErrorKind::kBroken, "rank 0 at ");
    }
  });
}

void run() {
  leaves_nothing([] {
    test_impostors();
    test_connecting();
    test_abort();
    test_death_in_the_tree();
  });
}

}  // namespace
}  // namespace refit::test

int main() {
  refit::test::run();
  return refit::test::finish("gloo_faults_test");
}
