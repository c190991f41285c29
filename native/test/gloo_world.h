// Worlds of gloo groups in one process, and a rank that breaks the protocol. For gloo_test.cc and gloo_faults_test.cc.
#pragma once
#include <dirent.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/memory_error.h"
#include "test/check.h"
#include "transport/gloo/gloo_group.h"

namespace refit::test {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using Bytes = std::vector<uint8_t>;

constexpr const char* kHost = "127.0.0.1";

GroupDeadline within(std::chrono::milliseconds time) { return Clock::now() + time; }
// A deadline that no test reaches.
GroupDeadline late() { return within(20s); }

uint8_t coded(uint64_t seed, uint64_t index) {
  uint64_t x = (seed + 1) * 0x9e3779b97f4a7c15u + index;
  x ^= x >> 29;
  x *= 0xbf58476d1ce4e5b9u;
  return static_cast<uint8_t>(x >> 32);
}

Bytes coded_bytes(uint64_t seed, uint64_t bytes) {
  Bytes out(bytes);
  for (uint64_t i = 0; i < bytes; i++) out[i] = coded(seed, i);
  return out;
}

int entries(const char* folder) {
  DIR* const dir = opendir(folder);
  int count = 0;
  while (readdir(dir) != nullptr) count++;
  closedir(dir);
  return count;
}

struct Thrown {
  bool any = false;
  GroupErrorKind kind = GroupErrorKind::kRefused;
  std::string message;

  bool says(const std::string& text) const { return message.find(text) != std::string::npos; }
};

Thrown thrown_by(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const GroupError& error) {
    return {true, error.kind, error.what()};
  } catch (const std::exception& error) {
    return {true, GroupErrorKind::kRefused, std::string("not a group's error: ") + error.what()};
  }
  return {};
}

#define CHECK_THROWN(expression, wanted, text)                                                   \
  do {                                                                                           \
    const Thrown got_ = (expression);                                                            \
    CHECKF(got_.any&& got_.kind == (wanted) && got_.says(text), "\"%s\"", got_.message.c_str()); \
  } while (0)

// One world whose ranks are spread over groups; each group stands for a process.
struct World {
  std::vector<std::unique_ptr<GlooGroup>> groups;
  std::vector<int> owner;  // of each rank

  // `parts[g]` has the ranks of group g.
  World(int size, const std::vector<std::vector<int>>& parts, bool lazy = false) : owner(size, -1) {
    for (const auto& ranks : parts) {
      for (const int rank : ranks) owner[rank] = static_cast<int>(groups.size());
      groups.push_back(std::make_unique<GlooGroup>(size, ranks, kHost));
    }
    std::vector<Bytes> peers;
    for (int rank = 0; rank < size; rank++) {
      peers.push_back(groups[owner[rank]]->address(rank));
      if (lazy) peers.back().resize(peers.back().size() - sizeof(int64_t) * size);
    }
    each([&](GlooGroup& group, int) { group.connect(peers, late()); });
  }

  // Runs fn on all groups at once, each on its own thread; an exception fails the test.
  void each(const std::function<void(GlooGroup&, int)>& fn) {
    std::vector<std::thread> threads;
    for (size_t g = 0; g < groups.size(); g++) {
      threads.emplace_back([&, g] {
        const Thrown thrown = thrown_by([&] { fn(*groups[g], static_cast<int>(g)); });
        CHECKF(!thrown.any, "%s", thrown.message.c_str());
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
};

std::vector<std::vector<int>> random_parts(int size, std::mt19937& random) {
  const int count = 1 + static_cast<int>(random() % size);
  std::vector<std::vector<int>> parts(count);
  std::vector<int> ranks(size);
  for (int rank = 0; rank < size; rank++) ranks[rank] = rank;
  std::shuffle(ranks.begin(), ranks.end(), random);
  for (int i = 0; i < size; i++) parts[i < count ? i : random() % count].push_back(ranks[i]);
  return parts;
}

// Rank 0 of 2; the test decides what it sends.
class Impostor {
 public:
  Impostor() {
    address_.host = "impostor";
    address_.socket = gloo::parse_host(kHost);
    listener_ = gloo::listen_on(address_.socket);
    address_.identifiers = {100, 101};
  }

  Bytes value() const { return gloo::encode(address_); }

  void meet(const GlooGroup& group) {
    const gloo::Address other = gloo::decode(group.address(1), 1, 2);
    if (gloo::connects(address_, other)) {
      CHECK(gloo::begin_connect(other.socket, fd_) == 0);
      wait(POLLOUT);
      CHECK(send(fd_.get(), &other.identifiers[0], 8, 0) == 8);
    } else {
      pollfd ready{listener_.get(), POLLIN, 0};
      CHECK(poll(&ready, 1, 10000) == 1);
      fd_ = gloo::Fd(accept(listener_.get(), nullptr, nullptr));
      int64_t number = 0;
      read(&number, 8);
      CHECK(number == 101);
    }
  }

  gloo::Header hear() {
    gloo::Header header;
    read(&header, sizeof header);
    return header;
  }

  void say(uint64_t opcode, uint64_t slot, uint64_t length, uint64_t bytes) {
    gloo::Header header;
    header.opcode = opcode;
    header.slot = slot;
    header.length = length;
    header.bytes = bytes;
    write(&header, sizeof header);
  }
  void say(uint64_t opcode, uint64_t slot, uint64_t length) {
    say(opcode, slot, length, sizeof(gloo::Header) + (opcode == gloo::kSend ? length : 0));
  }

  void write(const void* data, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
      wait(POLLOUT);
      const ssize_t sent = send(fd_.get(), static_cast<const char*>(data) + done, bytes - done, MSG_NOSIGNAL);
      if (!CHECK(sent > 0)) return;
      done += static_cast<size_t>(sent);
    }
  }
  bool is_cut_off() {
    if (!fd_) return true;
    wait(POLLIN);
    char byte = 0;
    ssize_t got = 0;
    while ((got = recv(fd_.get(), &byte, 1, 0)) == 1) wait(POLLIN);
    return got <= 0;
  }
  void leave() { gloo::close_hard(fd_); }
  void leave_softly() { fd_.reset(); }
  const gloo::Address& address() const { return address_; }

 private:
  void wait(short what) {
    pollfd ready{fd_.get(), what, 0};
    CHECK(poll(&ready, 1, 10000) == 1);
  }
  void read(void* out, size_t bytes) {
    for (size_t have = 0; have < bytes;) {
      wait(POLLIN);
      const ssize_t got = recv(fd_.get(), static_cast<char*>(out) + have, bytes - have, 0);
      if (!CHECK(got > 0)) return;
      have += static_cast<size_t>(got);
    }
  }

  gloo::Address address_;
  gloo::Fd listener_, fd_;
};

constexpr uint64_t kSlot0 = gloo::make_slot(gloo::kBroadcast, 0);

// The result of a group's receive of 1000 bytes when `act` runs on the other side.
Thrown receive_from(const std::function<void(Impostor&)>& act, std::chrono::milliseconds deadline = 20s) {
  GlooGroup group(2, {1}, kHost);
  Impostor impostor;
  std::thread other([&] {
    impostor.meet(group);
    act(impostor);
  });
  Thrown thrown = thrown_by([&] { group.connect({impostor.value(), group.address(1)}, late()); });
  CHECKF(!thrown.any, "%s", thrown.message.c_str());
  group.stage(1000);
  thrown = thrown_by([&] { group.receive(0, {{0, 600}, {600, 400}}, 0, within(deadline)); });
  other.join();
  if (thrown.any) {
    CHECK(impostor.is_cut_off());
    CHECK_THROWN(thrown_by([&] { group.barrier(late()); }), GroupErrorKind::kBroken, "unusable since");
    // The group returns no bytes if it does not know how many have arrived.
    CHECK_THROWN(thrown_by([&] { group.read(0, 0, 1000, late()); }), GroupErrorKind::kBroken, "unusable since");
    CHECKF(thrown.says("receive: ") && thrown.says(" s"), "%s", thrown.message.c_str());
  }
  group.end();
  return thrown;
}

// Runs the tests, and checks that they leave no descriptor and no thread behind.
void leaves_nothing(const std::function<void()>& tests) {
  std::thread([] {}).join();  // a sanitizer starts its own thread with the first one
  const int descriptors = entries("/proc/self/fd");
  const int threads = entries("/proc/self/task");
  tests();
  CHECKF(entries("/proc/self/fd") == descriptors, "%d, were %d", entries("/proc/self/fd"), descriptors);
  // The system may list a joined thread a little longer.
  for (int i = 0; entries("/proc/self/task") != threads && i < 100; i++) std::this_thread::sleep_for(10ms);
  CHECKF(entries("/proc/self/task") == threads, "%d, were %d", entries("/proc/self/task"), threads);
}

}  // namespace
}  // namespace refit::test
