#include "transport/gloo/gloo_pair.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace refit::gloo {
namespace {

// The most that is read from one connection before the others have their turn.
constexpr uint64_t kReadBudget = uint64_t{16} << 20;
constexpr size_t kMaxPieces = 64;
// Far more than torch ever has pending; a peer that announces more is no gloo peer.
constexpr size_t kMaxEarly = size_t{1} << 20;
// A larger number is no believable length.
constexpr uint64_t kMaxBytes = uint64_t{1} << 44;

std::string count(uint64_t bytes) { return std::to_string(bytes) + " bytes"; }

bool is_end(int error) { return error == ECONNRESET || error == EPIPE; }

}  // namespace

void Pair::attach(Fd fd) {
  set_no_delay(fd);
  fd_ = std::move(fd);
}

void Pair::open(uint64_t slot, Transfer* receive, Transfer* send) {
  const uint32_t tag = next_tag_++;
  const auto found = early_.find(tag);
  const Early early = found == early_.end() ? Early{} : found->second;
  if (found != early_.end()) early_.erase(found);
  if (receive == nullptr && send == nullptr && !early.send && !early.receive) return;
  if (has_failed()) throw PairFault{fault_};
  open_[tag] = {slot, receive, send};
  if (receive != nullptr) say(kRecvReady, slot, receive->bytes);
  for (const auto& [notified, opcode] : {std::pair{early.send, kSendReady}, {early.receive, kRecvReady}}) {
    if (!notified) continue;
    Header header;
    header.opcode = opcode;
    header.slot = notified->slot;
    header.length = notified->length;
    notice(header);
  }
}

void Pair::expect_message(uint64_t slot, Transfer& receive) {
  if (has_failed()) throw PairFault{fault_};
  if (!messages_.emplace(slot, &receive).second) throw PairFault{"is asked for " + slot_name(slot) + " twice"};
  const uint64_t expected = receive.bytes;
  const auto found = announced_.find(slot);
  if (found != announced_.end()) {
    expect(receive, slot, found->second.front());
    found->second.pop_front();
    announced_count_--;
    if (found->second.empty()) announced_.erase(found);
  }
  say(kRecvReady, slot, expected);
}

void Pair::start(uint64_t slot, Transfer& send) {
  if (has_failed()) throw PairFault{fault_};
  send.started = true;
  say(kSendReady, slot, send.bytes);
  if (send.wanted) send_bytes(slot, send);
}

void Pair::say(Opcode opcode, uint64_t slot, uint64_t length, Transfer* send) {
  Out out;
  out.header.opcode = opcode;
  out.header.slot = slot;
  out.header.length = length;
  if (send != nullptr) out.header.bytes += length;
  out.send = send;
  out_.push_back(out);
}

void Pair::send_bytes(uint64_t slot, Transfer& send) { say(kSend, slot, send.bytes, &send); }

void Pair::read() {
  if (!connected()) return;
  for (uint64_t budget = kReadBudget; budget > 0;) {
    const uint64_t left = incoming_ != nullptr ? incoming_->bytes - incoming_->done : 0;
    // Large transfers are received straight into their memory; TCP drops unwanted bytes unseen with MSG_TRUNC.
    const bool direct = left > 0 && inbox_bytes_ == 0;
    uint8_t* const to = direct ? (incoming_->into == nullptr ? nullptr : incoming_->into + incoming_->done)
                               : inbox_.data() + inbox_bytes_;
    const size_t room = direct ? left : inbox_.size() - inbox_bytes_;
    const ssize_t got = ::recv(fd_.get(), to, room, direct && to == nullptr ? MSG_TRUNC : 0);
    if (got < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return;
      return fail(is_end(errno) ? "ended, or broke its connection off (" + system_text(errno) + ")"
                                : "cannot be read from: " + system_text(errno));
    }
    if (got == 0) return fail("closed its connection");
    budget -= std::min(budget, static_cast<uint64_t>(got));
    if (direct) {
      arrived(static_cast<uint64_t>(got));
    } else {
      take(inbox_.data(), inbox_bytes_ + static_cast<size_t>(got));
    }
    // A short read has usually emptied the socket.
    if (static_cast<size_t>(got) < room) return;
  }
}

// `data` is the inbox from its start.
void Pair::take(const uint8_t* data, size_t bytes) {
  size_t at = 0;
  for (;;) {
    if (incoming_ != nullptr) {
      const size_t here = static_cast<size_t>(std::min<uint64_t>(bytes - at, incoming_->bytes - incoming_->done));
      if (incoming_->into != nullptr && here > 0) std::memcpy(incoming_->into + incoming_->done, data + at, here);
      at += here;
      arrived(here);
      if (incoming_ != nullptr) break;
    } else if (bytes - at >= sizeof(Header)) {
      Header header;
      std::memcpy(&header, data + at, sizeof header);
      at += sizeof header;
      take_header(header);
    } else {
      break;
    }
  }
  std::memmove(inbox_.data(), data + at, bytes - at);
  inbox_bytes_ = bytes - at;
}

void Pair::take_header(const Header& header) {
  const bool data = header.opcode == kSend;
  const uint64_t expected = sizeof(Header) + (data ? header.length : 0);
  if (header.opcode < kSend || header.opcode > kRecvReady || header.bytes != expected) {
    throw PairFault{"sent what is no message of gloo's (opcode " + std::to_string(header.opcode) + ", " +
                    count(header.bytes) + ", length " + std::to_string(header.length) +
                    "): is it a torch that is supported, with gloo over plain TCP?"};
  }
  if (!data) return notice(header);
  Transfer& receive = receive_of(header);
  expect(receive, header.slot, header.length);
  incoming_ = &receive;
  incoming_slot_ = header.slot;
}

Transfer& Pair::receive_of(const Header& header) {
  Transfer* receive = nullptr;
  if (is_message(header.slot)) {
    const auto found = messages_.find(header.slot);
    if (found != messages_.end()) receive = found->second;
  } else {
    receive = find(header).receive;
  }
  if (receive == nullptr || receive->complete) {
    throw PairFault{"sent bytes of " + slot_name(header.slot) + " that no rank had requested"};
  }
  return *receive;
}

Pair::Open& Pair::find(const Header& header) {
  const auto found = open_.find(tag_of(header.slot));
  if (found == open_.end()) {
    throw PairFault{"is in " + slot_name(header.slot) + ", which it has no part in or which is over: the two sides " +
                    "disagree about root, order or number of their collectives"};
  }
  if (found->second.slot != header.slot) {
    throw PairFault{"is in " + slot_name(header.slot) + " where this side is in " + slot_name(found->second.slot)};
  }
  return found->second;
}

void Pair::notice_message(const Header& header) {
  if (header.opcode != kSendReady) {
    throw PairFault{"waits for " + slot_name(header.slot) + ", and ranks of this process send no messages"};
  }
  const auto found = messages_.find(header.slot);
  if (found != messages_.end()) return expect(*found->second, header.slot, header.length);
  if (announced_count_ >= kMaxEarly) throw PairFault{"announces an implausible number of messages"};
  announced_[header.slot].push_back(header.length);
  announced_count_++;
}

void Pair::notice(const Header& header) {
  if (is_message(header.slot)) return notice_message(header);
  const uint32_t tag = tag_of(header.slot);
  const bool sends = header.opcode == kSendReady;
  if (static_cast<int32_t>(tag - next_tag_) >= 0) {
    if (early_.size() >= kMaxEarly) throw PairFault{"announces an implausible number of collectives"};
    auto& known = sends ? early_[tag].send : early_[tag].receive;
    if (known) throw PairFault{"announces " + slot_name(header.slot) + " twice"};
    known = Notice{header.slot, header.length};
    return;
  }
  Open& open = find(header);
  Transfer* const transfer = sends ? open.receive : open.send;
  if (transfer == nullptr) {
    throw PairFault{(sends ? "wants to send " : "waits for ") + slot_name(header.slot) + (sends ? " to" : " from") +
                    " a rank of this process, which disagrees: do the two sides name the same root?"};
  }
  if (sends) return expect(*transfer, header.slot, header.length);
  if (header.length != transfer->bytes) {
    throw PairFault{"waits for " + count(header.length) + " in " + slot_name(header.slot) + ", expected " +
                    std::to_string(transfer->bytes)};
  }
  if (transfer->wanted) throw PairFault{"announces " + slot_name(header.slot) + " twice"};
  transfer->wanted = true;
  if (transfer->started) send_bytes(header.slot, *transfer);
}

void Pair::expect(Transfer& receive, uint64_t slot, uint64_t announced) {
  if (announced == receive.bytes) return;
  const std::string what =
      "sends " + count(announced) + " in " + slot_name(slot) + ", expected " + std::to_string(receive.bytes);
  if (announced > kMaxBytes || !receive.wrong.empty()) throw PairFault{what};
  receive.wrong = what;
  receive.bytes = announced;
  receive.into = nullptr;
}

void Pair::arrived(uint64_t bytes) {
  incoming_->done += bytes;
  if (incoming_->done < incoming_->bytes) return;
  if (!incoming_->wrong.empty()) throw PairFault{incoming_->wrong};
  incoming_->complete = true;
  incoming_ = nullptr;
  settle(incoming_slot_);
}

// Forgets a collective when the pair has done its part in it, and a message that has arrived.
void Pair::settle(uint64_t slot) {
  if (is_message(slot)) {
    messages_.erase(slot);
    return;
  }
  const auto found = open_.find(tag_of(slot));
  const auto over = [](const Transfer* transfer) { return transfer == nullptr || transfer->complete; };
  if (found != open_.end() && over(found->second.receive) && over(found->second.send)) open_.erase(found);
}

bool Pair::write() {
  bool completed = false;
  while (has_output()) {
    iovec pieces[kMaxPieces];
    size_t used = 0;
    for (auto out = out_.begin(); out != out_.end() && used + 2 <= kMaxPieces; ++out) {
      if (out->header_done < sizeof(Header)) {
        pieces[used++] = {reinterpret_cast<uint8_t*>(&out->header) + out->header_done,
                          sizeof(Header) - out->header_done};
      }
      const Transfer* const send = out->send;
      if (send != nullptr && send->done < send->bytes) {
        pieces[used++] = {const_cast<uint8_t*>(send->from) + send->done, send->bytes - send->done};
      }
    }
    msghdr message{};
    message.msg_iov = pieces;
    message.msg_iovlen = used;
    const ssize_t written = ::sendmsg(fd_.get(), &message, MSG_NOSIGNAL);
    if (written < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) break;
      fail(is_end(errno) ? "ended, or broke its connection off (" + system_text(errno) + ")"
                         : "cannot be written to: " + system_text(errno));
      break;
    }
    auto left = static_cast<uint64_t>(written);
    while (!out_.empty()) {
      Out& out = out_.front();
      const uint64_t header = std::min<uint64_t>(left, sizeof(Header) - out.header_done);
      out.header_done += header;
      left -= header;
      if (out.header_done < sizeof(Header)) break;
      if (out.send != nullptr) {
        const uint64_t payload = std::min(left, out.send->bytes - out.send->done);
        out.send->done += payload;
        left -= payload;
        if (out.send->done < out.send->bytes) break;
        out.send->complete = completed = true;
        settle(out.header.slot);
      }
      out_.pop_front();
    }
  }
  return completed;
}

void Pair::fail(std::string what) {
  fault_ = std::move(what);
  close_hard(fd_);
  out_.clear();
  // A rank that has done its part may leave while others are still busy.
  if (!open_.empty() || !messages_.empty()) throw PairFault{fault_};
}

void Pair::close(bool hard) {
  if (hard) {
    close_hard(fd_);
  } else {
    close_soft(fd_);
  }
  open_.clear();
  early_.clear();
  messages_.clear();
  announced_.clear();
  announced_count_ = 0;
  out_.clear();
  incoming_ = nullptr;
  inbox_bytes_ = 0;
}

}  // namespace refit::gloo
