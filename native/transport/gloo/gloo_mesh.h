// The connections of a gloo group: one for each rank of this process and each rank elsewhere. Ranks of this process
// need none among themselves, because they share memory. Used by one thread, except `wake`.
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
  bool connects = false;   // this side connects
  bool lazy = false;       // the other side connects when it has something to do
  int64_t identifier = 0;  // the number by which the other side identifies this rank
  Fd connecting;
  int tries = 0;
  std::chrono::steady_clock::time_point next_try;
  std::string host;              // of the other rank
  std::vector<uint8_t> address;  // its listening address
  Pair pair;

  // `rank 3 at 10.0.0.1:4321 (trainer-0)`
  std::string name() const;
};

// An error and its link.
struct LinkFault {
  const Link* link = nullptr;  // null: no link in particular
  std::string what;
};

class Mesh {
 public:
  // Listens for the other ranks, once for each of `ranks`. Throws GroupError (kRefused); std::invalid_argument.
  Mesh(int size, const std::vector<int>& ranks, const std::string& host);
  ~Mesh();
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;

  // The value that the other ranks need to connect to the k-th of `ranks`.
  std::vector<uint8_t> address(size_t k) const { return encode(addresses_[k]); }
  // `peers`: every rank's address. Throws GroupError (kRefused) for an unknown format, before it connects.
  void meet(const std::vector<std::vector<uint8_t>>& peers);
  // All links are connected, except those whose other side connects later.
  bool met() const;

  std::deque<Link>& links() { return links_; }
  // Null if both ranks are in this process.
  Link* link(int mine, int other);

  // Writes pending output, then waits until `until` for input and reads it. May return early. Throws LinkFault.
  void poll(std::chrono::steady_clock::time_point until);
  // Any thread. Makes the current or next poll() return at once.
  void wake() noexcept;

  // Stops listening. Hard: the other ranks see an error at once.
  void close(bool hard);

 private:
  // A connection that has not sent its number yet.
  struct Caller {
    Fd fd;
    size_t listener = 0;
    uint8_t number[sizeof(int64_t)] = {};
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
