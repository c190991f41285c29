// The connections of a gloo group: each rank of this process with each rank elsewhere. Ranks of this process need none
// among themselves: they share their memory. Used by one thread, but for `wake`.
#pragma once
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "transport/gloo/gloo_pair.h"
#include "transport/gloo/gloo_wire.h"

namespace refit::gloo {

// A rank of this process and one elsewhere.
struct Link {
  int mine = 0;
  int other = 0;
  bool connects = false;   // this side does
  bool lazy = false;       // the other side comes when it has something to do
  int64_t identifier = 0;  // what the other side is told of who this is
  Fd connecting;
  int tries = 0;
  std::chrono::steady_clock::time_point next_try;
  std::string host;              // of the other rank
  std::vector<uint8_t> address;  // where it listens
  Pair pair;

  // `rank 3 at 10.0.0.1:4321 (trainer-0)`
  std::string name() const;
};

// What has gone wrong with whom.
struct LinkFault {
  const Link* link = nullptr;  // null: with none of them
  std::string what;
};

class Mesh {
 public:
  // Listens for the others, once for each of `ranks`. Throws GroupError(kRefused); std::invalid_argument.
  Mesh(int size, const std::vector<int>& ranks, const std::string& host);
  ~Mesh();
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;

  // What the other ranks must know of the k-th of `ranks`.
  std::vector<uint8_t> address(size_t k) const { return encode(addresses_[k]); }
  // Every rank's. Throws GroupError(kRefused) for what is not understood, before anything is connected.
  void meet(const std::vector<std::vector<uint8_t>>& peers);
  // No link is left to be waited for: all are connected but those whose other side comes later.
  bool met() const;

  std::deque<Link>& links() { return links_; }
  // Null where both are of this process.
  Link* link(int mine, int other);

  // Writes what there is to be written, then waits until `until` for something to come, and takes it. May return early.
  // Throws LinkFault.
  void poll(std::chrono::steady_clock::time_point until);
  // Any thread. From now on poll() returns at once.
  void wake() noexcept;

  // Hard: the others see an error at once. Listens no more.
  void close(bool hard);

 private:
  // A connection that has not said yet who it is.
  struct Caller {
    Fd fd;
    size_t listener = 0;
    uint8_t said[sizeof(int64_t)] = {};
    size_t bytes = 0;
  };
  enum class Kind : uint32_t { kWake, kListener, kCaller, kLink };

  void watch(int fd, Kind kind, size_t index, bool output, bool again = false);
  void answer(size_t listener);
  void hear(uint32_t caller);
  void begin(Link& link);
  void connected(Link& link);
  void retry(Link& link, int error);
  void up(Link& link, Fd fd);
  void serve(Link& link, uint32_t events);
  size_t index_of(int mine, int other) const;
  size_t index_of(const Link& link) const { return index_of(link.mine, link.other); }

  const int size_;
  const std::vector<int> ranks_;
  Fd epoll_, wake_;
  std::vector<Fd> listeners_;
  std::vector<Address> addresses_;
  std::deque<Link> links_;  // [rank of this process][rank elsewhere], in order
  size_t down_ = 0;         // links that are not connected yet
  std::map<uint32_t, Caller> callers_;
  uint32_t next_caller_ = 0;
};

}  // namespace refit::gloo
