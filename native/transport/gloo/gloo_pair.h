// One connection between a rank of this process and a rank elsewhere, and its transfers. Used by one thread.
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

// The connection is unusable: the other side ended or broke the protocol. The text continues "rank 3 at ...".
struct PairFault {
  std::string what;
};

// The bytes of one collective in one direction. The collective owns it; its pair points to it until it is complete.
struct Transfer {
  uint64_t bytes = 0;
  uint8_t* into = nullptr;        // for a receive; null: the bytes are dropped
  const uint8_t* from = nullptr;  // for a send
  uint64_t done = 0;
  bool complete = false;  // all bytes have arrived, or the system has taken all
  bool started = false;   // a send: `from` is there
  bool wanted = false;    // a send: the other side has announced that it is ready
  // A receive: the other side sends another number of bytes. They are received and dropped before this is reported:
  // gloo's senders do not notice that a connection is closed while they send, and would wait for their own timeout.
  std::string wrong;
};

class Pair {
 public:
  Pair() = default;
  // Neither copied nor moved: the system writes to the inbox, and transfers are pointed to.
  Pair(const Pair&) = delete;
  Pair& operator=(const Pair&) = delete;

  bool connected() const { return static_cast<bool>(fd_); }
  bool has_failed() const { return !fault_.empty(); }
  int fd() const { return fd_.get(); }
  void attach(Fd fd);

  // Call it for every collective in order of their tags; `receive` and `send` are null if the pair has no part in it.
  // Like
  // all functions below it may throw PairFault: an earlier announcement of the other side does not fit.
  void open(uint64_t slot, Transfer* receive, Transfer* send);
  // Receives a message of torch's send, whose tag is `slot`. At most one message of a tag is expected at a time.
  void expect_message(uint64_t slot, Transfer& receive);
  // The bytes of a send are available.
  void start(uint64_t slot, Transfer& send);
  // A connection that ends while the pair has no pending transfer is no error.
  void read();
  // True if a send has become complete.
  bool write();
  bool has_output() const { return connected() && !out_.empty(); }
  // True if epoll reports when output can be written.
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
  // Announcements of the other side about collectives that have not begun here.
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
  void notice_message(const Header& header);
  Transfer& receive_of(const Header& header);
  void expect(Transfer& receive, uint64_t slot, uint64_t announced);
  Open& find(const Header& header);
  void arrived(uint64_t bytes);
  void settle(uint64_t slot);
  void say(Opcode opcode, uint64_t slot, uint64_t length, Transfer* send = nullptr);
  void send_bytes(uint64_t slot, Transfer& send);
  void fail(std::string what);

  Fd fd_;
  std::string fault_;
  uint32_t next_tag_ = 0;
  std::unordered_map<uint32_t, Open> open_;
  std::unordered_map<uint32_t, Early> early_;
  // Messages that are expected, by tag, and lengths of those that the other side has announced before.
  std::unordered_map<uint64_t, Transfer*> messages_;
  std::unordered_map<uint64_t, std::deque<uint64_t>> announced_;
  size_t announced_count_ = 0;
  std::deque<Out> out_;
  // The receive whose header has arrived, and its slot.
  Transfer* incoming_ = nullptr;
  uint64_t incoming_slot_ = 0;
  // Headers and the first bytes behind them: one system call for many small messages.
  std::array<uint8_t, 16384> inbox_;
  size_t inbox_bytes_ = 0;
};

}  // namespace refit::gloo
