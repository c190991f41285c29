#include "codec/tensor_delta.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "codec/xxh3.h"
#include "codec/zstd_stream.h"

namespace refit {
namespace {

// Small enough to stay in a core's cache between decompression, change and checksum.
constexpr size_t kPiece = 1 << 20;

// RFC 1950.
class Adler32 {
 public:
  void update(const uint8_t* data, size_t size) {
    while (size > 0) {
      // The most bytes after which the sums still fit 32 bits.
      const size_t part = std::min<size_t>(size, 5552);
      for (size_t i = 0; i < part; i++) b_ += a_ += data[i];
      a_ %= 65521;
      b_ %= 65521;
      data += part;
      size -= part;
    }
  }
  std::string hex() const {
    char text[9];
    snprintf(text, sizeof text, "%08x", b_ << 16 | a_);
    return text;
  }

 private:
  uint32_t a_ = 1, b_ = 0;
};

[[noreturn]] void failed(const char* call) { throw std::runtime_error(std::string(call) + ": " + strerror(errno)); }

void read_all(int fd, uint8_t* out, size_t size, uint64_t offset) {
  while (size > 0) {
    const ssize_t part = pread(fd, out, size, static_cast<off_t>(offset));
    if (part < 0 && errno == EINTR) continue;
    if (part < 0) failed("pread");
    if (part == 0) throw std::runtime_error("its file is cut off");
    out += part;
    offset += static_cast<uint64_t>(part);
    size -= static_cast<size_t>(part);
  }
}

void write_all(int fd, const uint8_t* data, size_t size, uint64_t offset) {
  while (size > 0) {
    const ssize_t part = pwrite(fd, data, size, static_cast<off_t>(offset));
    if (part < 0 && errno == EINTR) continue;
    if (part < 0) failed("pwrite");
    data += part;
    offset += static_cast<uint64_t>(part);
    size -= static_cast<size_t>(part);
  }
}

void require_end(ZstdStream& change) {
  uint8_t more;
  if (change.read(&more, 1) != 0) throw std::runtime_error("its change holds more bytes than it has");
}

template <typename Hash>
std::string apply_xor(const TensorDelta& delta) {
  ZstdStream change(delta.data, delta.size);
  Hash hash;
  std::vector<uint8_t> diff(std::min<uint64_t>(kPiece, delta.bytes));
  std::vector<uint8_t> bytes(diff.size());
  for (uint64_t done = 0; done < delta.bytes;) {
    const auto size = static_cast<size_t>(std::min<uint64_t>(kPiece, delta.bytes - done));
    if (change.read(diff.data(), size) != size) throw std::runtime_error("its change holds fewer bytes than it has");
    read_all(delta.fd, bytes.data(), size, delta.offset + done);
    if (std::any_of(diff.data(), diff.data() + size, [](uint8_t byte) { return byte != 0; })) {
      for (size_t i = 0; i < size; i++) bytes[i] ^= diff[i];
      write_all(delta.fd, bytes.data(), size, delta.offset + done);
    }
    hash.update(bytes.data(), size);
    done += size;
  }
  require_end(change);
  return hash.hex();
}

void take(ZstdStream& change, void* out, size_t size) {
  if (change.read(static_cast<uint8_t*>(out), size) != size) throw std::runtime_error("its change is cut off");
}

// Reads `count` values of a change, from byte `from` of it, in pieces, because a decompressed change is large.
template <typename T>
class Values {
 public:
  Values(const TensorDelta& delta, uint64_t from, uint32_t count) : change_(delta.data, delta.size), left_(count) {
    uint8_t skipped[4096];
    for (uint64_t at = 0; at < from; at += sizeof skipped)
      take(change_, skipped, std::min<uint64_t>(sizeof skipped, from - at));
  }
  bool next(T& value) {
    if (at_ == size_) {
      if (left_ == 0) return false;
      at_ = 0;
      size_ = std::min<uint32_t>(left_, kChunk);
      take(change_, chunk_.data(), size_ * sizeof(T));
      left_ -= size_;
    }
    value = chunk_[at_++];
    return true;
  }
  ZstdStream& rest() { return change_; }

 private:
  static constexpr uint32_t kChunk = 1 << 14;

  ZstdStream change_;
  uint32_t left_, at_ = 0, size_ = 0;
  std::vector<T> chunk_ = std::vector<T>(kChunk);
};

struct Overwrite {
  uint32_t count = 0;
  bool rises = true;  // true while the positions are in ascending order
};

// Reads the whole change once before anything is written, so a broken change writes nothing.
Overwrite checked_overwrite(const TensorDelta& delta) {
  Overwrite out;
  {
    ZstdStream change(delta.data, delta.size);
    take(change, &out.count, sizeof out.count);
  }
  if (out.count > delta.bytes) throw std::runtime_error("more bytes change than it has");
  Values<uint32_t> positions(delta, sizeof out.count, out.count);
  for (uint32_t position = 0, last = 0; positions.next(position); last = position) {
    if (position >= delta.bytes) throw std::runtime_error("a byte behind its end changes");
    if (position < last) out.rises = false;
  }
  uint8_t skipped[4096];
  for (uint64_t at = 0; at < out.count; at += sizeof skipped)
    take(positions.rest(), skipped, std::min<uint64_t>(sizeof skipped, out.count - at));
  require_end(positions.rest());
  return out;
}

template <typename Hash>
std::string apply_overwrite(const TensorDelta& delta) {
  const auto [count, rises] = checked_overwrite(delta);
  Values<uint32_t> positions(delta, sizeof count, count);
  Values<uint8_t> values(delta, sizeof count * (uint64_t{1} + count), count);
  Hash hash;
  const uint64_t piece = rises ? kPiece : delta.bytes;
  std::vector<uint8_t> bytes(std::min<uint64_t>(piece, delta.bytes));
  uint32_t position = 0;
  bool more = positions.next(position);
  for (uint64_t done = 0; done < delta.bytes;) {
    const auto size = static_cast<size_t>(std::min<uint64_t>(piece, delta.bytes - done));
    read_all(delta.fd, bytes.data(), size, delta.offset + done);
    const bool changes = more && position - done < size;
    for (; more && position - done < size; more = positions.next(position)) values.next(bytes[position - done]);
    if (changes) write_all(delta.fd, bytes.data(), size, delta.offset + done);
    hash.update(bytes.data(), size);
    done += size;
  }
  return hash.hex();
}

template <typename Hash>
std::string apply(const TensorDelta& delta, DeltaEncoding encoding) {
  return encoding == DeltaEncoding::kXor ? apply_xor<Hash>(delta) : apply_overwrite<Hash>(delta);
}

}  // namespace

std::vector<std::string> apply_deltas(const std::vector<TensorDelta>& deltas, DeltaEncoding encoding,
                                      DeltaChecksum checksum, int threads) {
  std::vector<std::string> sums(deltas.size());
  std::atomic<size_t> next = 0;
  std::mutex lock;
  std::string error;
  const auto work = [&] {
    for (size_t i = next++; i < deltas.size(); i = next++) {
      try {
        sums[i] =
            checksum == DeltaChecksum::kXxh3 ? apply<Xxh3>(deltas[i], encoding) : apply<Adler32>(deltas[i], encoding);
      } catch (const std::exception& failure) {
        const std::lock_guard<std::mutex> guard(lock);
        if (error.empty()) error = std::to_string(i) + ": " + failure.what();
        next = deltas.size();
      }
    }
  };
  std::vector<std::thread> workers;
  const size_t most = std::min<size_t>(deltas.size(), static_cast<size_t>(std::max(threads, 1)));
  workers.reserve(most);
  try {
    for (size_t i = 1; i < most; i++) workers.emplace_back(work);
  } catch (const std::system_error&) {
    // The threads that did start do all the work.
  }
  work();
  for (std::thread& worker : workers) worker.join();
  if (!error.empty()) throw std::runtime_error(error);
  return sums;
}

}  // namespace refit
