// One connection between a rank of this process and one elsewhere, and what goes over it. Used by one thread.
#pragma once
#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <unordered_map>

#include "transport/gloo/gloo_socket.h"
#include "transport/gloo/gloo_wire.h"

namespace refit::gloo {

// The connection is of no use: the other side ended, or sent what it must not. The text goes on from "rank 3 at ...".
struct PairFault {
  std::string what;
};

// The bytes of one collective in one direction. Owned by the collective, known to its pair until it is complete.
struct Transfer {
  uint64_t bytes = 0;
  uint8_t* into = nullptr;        // of a receive; null: they are dropped
  const uint8_t* from = nullptr;  // of a send
  uint64_t done = 0;
  bool complete = false;  // all have come, or the system has taken all
  bool started = false;   // a send: `from` is there
  bool wanted = false;    // a send: the other side has said that it is ready
  // A receive: the other side sends another number of bytes. They are taken and dropped before this is said: gloo's
  // senders do not notice a connection that is closed while they send, and would wait for their own timeout.
  std::string wrong;
};

class Pair {
 public:
  Pair() = default;
  // What must not move: the system writes to the inbox, and transfers are pointed to.
  Pair(const Pair&) = delete;
  Pair& operator=(const Pair&) = delete;

  bool connected() const { return static_cast<bool>(fd_); }
  bool has_failed() const { return !fault_.empty(); }
  int fd() const { return fd_.get(); }
  void attach(Fd fd);

  // Every pair is told of every collective, in order of their tags; `receive` and `send` are null where the pair has no
  // part in it. May throw PairFault, as all that follows: what the other side has announced already does not fit.
  void open(uint64_t slot, Transfer* receive, Transfer* send);
  // The bytes of a send are there.
  void start(uint64_t slot, Transfer& send);
  // Nothing throws for a connection that ended while the pair has no part in anything.
  void read();
  // True where a send has become complete.
  bool write();
  bool has_output() const { return connected() && !out_.empty(); }
  // The system tells when output can be written; this is whether it has been asked to.
  bool watched_output = false;

  void close(bool hard);

 private:
  struct Open {
    uint64_t slot = 0;
    Transfer* receive = nullptr;
    Transfer* send = nullptr;
  };
  struct Notice {
    uint64_t slot = 0;
    uint64_t length = 0;
  };
  // What the other side has said of collectives that are still to come here.
  struct Early {
    std::optional<Notice> send, receive;
  };
  struct Out {
    Header header;
    Transfer* send = nullptr;  // its bytes follow the header
    size_t header_done = 0;
  };

  void take(const uint8_t* data, size_t bytes);
  void take_header(const Header& header);
  void notice(const Header& header);
  void expect(Transfer& receive, uint64_t slot, uint64_t announced);
  Open& find(const Header& header);
  void arrived(uint64_t bytes);
  void settle(uint32_t tag);
  void say(Opcode opcode, uint64_t slot, uint64_t length, Transfer* send = nullptr);
  void send_bytes(uint64_t slot, Transfer& send);
  void fail(std::string what);

  Fd fd_;
  std::string fault_;
  uint32_t next_tag_ = 0;
  std::unordered_map<uint32_t, Open> open_;
  std::unordered_map<uint32_t, Early> early_;
  std::deque<Out> out_;
  // A receive whose header has come, and its tag.
  Transfer* incoming_ = nullptr;
  uint32_t incoming_tag_ = 0;
  // Headers, and the first bytes behind them: one call of the system for many small messages.
  std::array<uint8_t, 16384> inbox_;
  size_t inbox_bytes_ = 0;
};

}  // namespace refit::gloo
