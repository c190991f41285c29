// Changes of tensors in files: what they make of them, what they sum up to, and what is refused of hostile ones.
#include <dlfcn.h>
#include <fcntl.h>
#include <malloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "codec/tensor_delta.h"
#include "codec/xxh3.h"
#include "codec/zstd_stream.h"
#include "test/check.h"

using namespace refit;

namespace {

// What C++ has allocated in this process, in bytes.
std::atomic<size_t> allocated{0}, most_allocated{0};

}  // namespace

void* operator new(size_t size) {
  void* const memory = std::malloc(size);
  if (memory == nullptr) throw std::bad_alloc();
  const size_t now = allocated += malloc_usable_size(memory);
  for (size_t most = most_allocated; now > most && !most_allocated.compare_exchange_weak(most, now);) {
  }
  return memory;
}
void operator delete(void* memory) noexcept {
  allocated -= malloc_usable_size(memory);
  std::free(memory);
}
void operator delete(void* memory, size_t) noexcept { operator delete(memory); }

namespace {

using Bytes = std::vector<uint8_t>;
constexpr size_t kMiB = 1 << 20;

// The buffer of xxHash's own tests (tests/sanity_test.c).
Bytes sanity(size_t size) {
  Bytes bytes(size);
  uint64_t state = 2654435761U;
  for (uint8_t& byte : bytes) {
    byte = static_cast<uint8_t>(state >> 56);
    state *= 11400714785074694797U;
  }
  return bytes;
}

struct Vector {
  size_t size;
  const char *xxh3, *adler32;
};

// By xxHash 0.8.3 and zlib, of the first bytes of that buffer: every branch of the specification, and both sides of
// each border between them.
constexpr Vector kVectors[] = {
    {0, "99aa06d3014798d86001c324468d497f", "00000001"},    {1, "a6cd5e9392000f6ac44bdff4074eecdb", "00010001"},
    {2, "76750c3c7bf956687a9978044cb8a8bb", "00540053"},    {3, "20efc49ff02422ea54247382a8d6b94d", "013900e5"},
    {4, "970d585ac632bf8e2e7d8d6876a39fe9", "02b90180"},    {6, "082afe0b8162d12a3e7039bdda43cfc6", "07590269"},
    {8, "47a7f080d82bb45664c69cab4bb21dc5", "0d950330"},    {9, "564ef6078950d457ed7ccbc501eb7501", "10f2035d"},
    {12, "6e3efd8fc7802b18061a192713f69ad9", "1cfc04a1"},   {16, "c68c368ecf8a9c05562980258a998629", "347f06e6"},
    {17, "955fa78643ed3669abbc12d11973d7db", "3c4807c9"},   {24, "0ce966e4678d37611e7044d28b1b901d", "88470ca1"},
    {48, "a002ac4e5478227ef942219aed80f67b", "4e5818c8"},   {80, "fdf2cefde9eaac8a454ae6bf7a8a532d", "6b4a28ad"},
    {128, "39992220e045260aebb15e34a7fb5ab1", "4aaf40e9"},  {129, "03815fc91f1b30b686c9e3bc8f0a3b5c", "8c8b41dc"},
    {195, "7729543a26b207ee3fb593c086a66075", "856f6680"},  {222, "337e09641b948717f1aebd597cec6b3a", "2df974c4"},
    {240, "aa4202daa2769dc85c9aae94c8ebe5a0", "b4707e46"},  {241, "99a80ecf0ecfc647c5a639ecd2030e5e", "33aa7f2b"},
    {403, "1b6de21e332dd73dcdeb804d65c6dea4", "f162d4f3"},  {512, "18d2d110dcc9bca1617e49599013cb6b", "517b0a3e"},
    {1024, "0d30d24071c64c57dd85c9b5c1109c5c", "ef520479"}, {1025, "fd3ee4fe7f2954c6d870c0fa13211c6a", "f4c1056f"},
    {2048, "f736557fd47073a5dd59e2c3a5f038e0", "a50405f5"}, {2240, "ccb134fbfa7ce49d6e73a90539cf2948", "d6a76751"},
    {2367, "e89c0f6ff369b427cb37aeb9e5d361ed", "2cbca688"}, {4096, "b9cfaea2ca5626a4e91206429d1f48f9", "8294fdbd"},
    {4113, "83c02dcc7a80659601f24dfb53ed6d89", "af00075e"}};

// Zstandard frames by hand (RFC 8878, 3.1.1): blocks as they are, or of one byte repeated, which four bytes make 128
// KiB.
class Frame {
 public:
  // No size of the content; a window of 2^(10 + exponent) bytes.
  explicit Frame(int exponent = 10) : bytes_{0x28, 0xb5, 0x2f, 0xfd, 0x00, static_cast<uint8_t>(exponent << 3)} {}
  Frame& raw(const Bytes& data) {
    head(0, data.size());
    bytes_.insert(bytes_.end(), data.begin(), data.end());
    return *this;
  }
  Frame& repeat(uint8_t byte, size_t count) {
    head(1, count);
    bytes_.push_back(byte);
    return *this;
  }
  // An empty last block.
  Bytes end() {
    bytes_.insert(bytes_.end(), {1, 0, 0});
    return bytes_;
  }

 private:
  void head(uint32_t type, size_t size) {
    const auto word = static_cast<uint32_t>(size << 3 | type << 1);
    bytes_.insert(bytes_.end(),
                  {static_cast<uint8_t>(word), static_cast<uint8_t>(word >> 8), static_cast<uint8_t>(word >> 16)});
  }
  Bytes bytes_;
};

// As trainers compress: libzstd, level 1.
Bytes compressed(const Bytes& data) {
  static void* const library = dlopen("libzstd.so.1", RTLD_NOW | RTLD_LOCAL);
  static auto* const compress =
      reinterpret_cast<size_t (*)(void*, size_t, const void*, size_t, int)>(dlsym(library, "ZSTD_compress"));
  Bytes out(data.size() + data.size() / 128 + 1024);
  out.resize(compress(out.data(), out.size(), data.data(), data.size(), 1));
  return out;
}

// A file in memory.
class File {
 public:
  explicit File(const Bytes& bytes) : fd_(memfd_create("delta_test", MFD_CLOEXEC)), size_(bytes.size()) {
    CHECK(fd_ >= 0);
    CHECK(pwrite(fd_, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
  }
  ~File() { close(fd_); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int fd() const { return fd_; }
  Bytes bytes() const {
    Bytes out(size_);
    CHECK(pread(fd_, out.data(), out.size(), 0) == static_cast<ssize_t>(out.size()));
    CHECK(lseek(fd_, 0, SEEK_END) == static_cast<off_t>(size_));
    return out;
  }

 private:
  int fd_;
  size_t size_;
};

Bytes noise(size_t size, uint32_t seed) {
  std::mt19937 random(seed);
  Bytes bytes(size);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

Bytes xor_of(const Bytes& a, const Bytes& b) {
  Bytes out(a.size());
  for (size_t i = 0; i < a.size(); i++) out[i] = a[i] ^ b[i];
  return out;
}

void add_word(Bytes& out, uint32_t word) {
  for (int shift = 0; shift < 32; shift += 8) out.push_back(static_cast<uint8_t>(word >> shift));
}

Bytes overwrite_of(const Bytes& before, const Bytes& after) {
  Bytes at, values;
  for (size_t i = 0; i < after.size(); i++) {
    if (before[i] == after[i]) continue;
    add_word(at, static_cast<uint32_t>(i));
    values.push_back(after[i]);
  }
  Bytes out;
  add_word(out, static_cast<uint32_t>(values.size()));
  out.insert(out.end(), at.begin(), at.end());
  out.insert(out.end(), values.begin(), values.end());
  return out;
}

std::string xxh3(const Bytes& bytes) {
  Xxh3 hash;
  hash.update(bytes.data(), bytes.size());
  return hash.hex();
}

// What the one delta is refused with; empty: it is not.
std::string refusal(const Bytes& change, DeltaEncoding encoding, const Bytes& before, uint64_t offset, uint64_t size,
                    Bytes* after = nullptr) {
  const File file(before);
  std::string why;
  try {
    apply_deltas({{file.fd(), offset, size, change.data(), change.size()}}, encoding, DeltaChecksum::kXxh3, 1);
  } catch (const std::runtime_error& error) {
    why = error.what();
  }
  const Bytes bytes = file.bytes();
  // Nothing outside of the tensor, whatever came of it.
  for (size_t i = 0; i < before.size(); i++) {
    if (i >= offset && i - offset < size) continue;
    if (!CHECKF(bytes[i] == before[i], "byte %zu lies outside of [%lu, %lu)", i, offset, offset + size)) break;
  }
  if (after != nullptr) *after = bytes;
  return why;
}

#define CHECK_REFUSED(why, text)                                    \
  do {                                                              \
    const std::string got = (why);                                  \
    CHECKF(got.find(text) != std::string::npos, "%s", got.c_str()); \
  } while (false)

void checksums_are_those_of_the_specifications() {
  const Bytes all = sanity(5000);
  for (const Vector& vector : kVectors) {
    const Bytes bytes(all.begin(), all.begin() + static_cast<ptrdiff_t>(vector.size));
    CHECKF(xxh3(bytes) == vector.xxh3, "%zu bytes: %s", vector.size, xxh3(bytes).c_str());
    // In pieces of every kind.
    for (const size_t piece : {size_t{1}, size_t{63}, size_t{64}, size_t{65}, size_t{1024}, size_t{1500}}) {
      Xxh3 hash;
      for (size_t at = 0; at < bytes.size(); at += piece)
        hash.update(bytes.data() + at, std::min(piece, bytes.size() - at));
      CHECKF(hash.hex() == vector.xxh3, "%zu bytes in pieces of %zu", vector.size, piece);
    }
    // A change of nothing leaves the sum of what is there.
    const File file(bytes);
    const Bytes none = compressed(Bytes(bytes.size()));
    for (const DeltaChecksum kind : {DeltaChecksum::kXxh3, DeltaChecksum::kAdler32}) {
      const auto sums =
          apply_deltas({{file.fd(), 0, bytes.size(), none.data(), none.size()}}, DeltaEncoding::kXor, kind, 1);
      CHECK(sums.size() == 1 && sums[0] == (kind == DeltaChecksum::kXxh3 ? vector.xxh3 : vector.adler32));
    }
  }
  // Sums that would overflow: the most that fits between two reductions, and more.
  const Bytes high(3 * 5552 + 7, 0xff);
  uint32_t a = 1, b = 0;
  for (const uint8_t byte : high) {
    a = (a + byte) % 65521;
    b = (b + a) % 65521;
  }
  char expected[9];
  snprintf(expected, sizeof expected, "%08x", b << 16 | a);
  const File file(high);
  const Bytes none = compressed(Bytes(high.size()));
  CHECK(apply_deltas({{file.fd(), 0, high.size(), none.data(), none.size()}}, DeltaEncoding::kXor,
                     DeltaChecksum::kAdler32, 1)[0] == expected);
}

// Tensors of all sizes in one file, with gaps between them that nobody may touch, changed by several threads.
void tensors_become_what_they_are_to_be(DeltaEncoding encoding, int threads) {
  const std::vector<size_t> sizes = {0, 1, 2, 255, 4096, kMiB - 1, kMiB, kMiB + 1, 3 * kMiB + 12345};
  Bytes before, after;
  std::vector<std::pair<size_t, size_t>> places;
  std::vector<Bytes> changes;
  std::vector<std::string> expected;
  for (size_t i = 0; i < sizes.size(); i++) {
    const Bytes gap = noise(13, static_cast<uint32_t>(100 + i));
    before.insert(before.end(), gap.begin(), gap.end());
    after.insert(after.end(), gap.begin(), gap.end());
    const Bytes old = noise(sizes[i], static_cast<uint32_t>(i));
    Bytes now = old;
    // Some bytes, the first and the last among them; of one tensor whole pieces stay.
    std::mt19937 random(static_cast<uint32_t>(i));
    for (size_t k = 0; k < now.size() / 50; k++)
      now[random() % (i == 8 ? kMiB : now.size())] ^= static_cast<uint8_t>(1 + random() % 255);
    if (!now.empty()) now.front() ^= 0x80;
    if (!now.empty()) now.back() ^= 0x01;
    places.emplace_back(before.size(), sizes[i]);
    before.insert(before.end(), old.begin(), old.end());
    after.insert(after.end(), now.begin(), now.end());
    changes.push_back(compressed(encoding == DeltaEncoding::kXor ? xor_of(old, now) : overwrite_of(old, now)));
    expected.push_back(xxh3(now));
  }
  before.push_back(7);
  after.push_back(7);
  const File file(before);
  std::vector<TensorDelta> deltas;
  for (size_t i = 0; i < sizes.size(); i++)
    deltas.push_back({file.fd(), places[i].first, places[i].second, changes[i].data(), changes[i].size()});
  CHECK(apply_deltas(deltas, encoding, DeltaChecksum::kXxh3, threads) == expected);
  CHECK(file.bytes() == after);
}

void a_change_may_be_of_several_frames_and_of_no_bytes() {
  const Bytes before(300, 1);
  const File file(before);
  Bytes change = Frame().repeat(2, 100).end();
  const Bytes second = Frame().raw(Bytes(200, 4)).end();
  change.insert(change.end(), second.begin(), second.end());
  apply_deltas({{file.fd(), 0, 300, change.data(), change.size()}}, DeltaEncoding::kXor, DeltaChecksum::kXxh3, 1);
  Bytes expected(300, 5);
  std::fill_n(expected.begin(), 100, 3);
  CHECK(file.bytes() == expected);
  CHECK(apply_deltas({}, DeltaEncoding::kXor, DeltaChecksum::kXxh3, 4).empty());
  CHECK(apply_deltas({{file.fd(), 0, 0, nullptr, 0}}, DeltaEncoding::kXor, DeltaChecksum::kXxh3, 1)[0] ==
        kVectors[0].xxh3);
}

void sizes_that_lie_are_refused() {
  const Bytes before = noise(5000, 1);
  const auto xor_refusal = [&](const Bytes& change) {
    return refusal(change, DeltaEncoding::kXor, before, 1000, 3000);
  };
  CHECK(xor_refusal(Frame().repeat(1, 3000).end()).empty());
  CHECK_REFUSED(xor_refusal(Frame().repeat(1, 2999).end()), "0: its change holds fewer bytes than it has");
  CHECK_REFUSED(xor_refusal(Frame().repeat(1, 3001).end()), "0: its change holds more bytes than it has");
  CHECK_REFUSED(xor_refusal({}), "fewer bytes");
  // A second frame behind what is enough.
  Bytes twice = Frame().repeat(1, 3000).end();
  const Bytes more = Frame().repeat(1, 1).end();
  twice.insert(twice.end(), more.begin(), more.end());
  CHECK_REFUSED(xor_refusal(twice), "more bytes");

  const auto overwrite_refusal = [&](const Bytes& plain) {
    return refusal(Frame().raw(plain).end(), DeltaEncoding::kOverwrite, before, 1000, 3000);
  };
  const auto overwrite = [](uint32_t count, const std::vector<uint32_t>& at, size_t values) {
    Bytes out;
    add_word(out, count);
    for (const uint32_t place : at) add_word(out, place);
    out.insert(out.end(), values, 9);
    return out;
  };
  CHECK(overwrite_refusal(overwrite(0, {}, 0)).empty());
  CHECK(overwrite_refusal(overwrite(2, {0, 2999}, 2)).empty());
  CHECK_REFUSED(overwrite_refusal({}), "its change is cut off");
  CHECK_REFUSED(overwrite_refusal({1, 0, 0}), "its change is cut off");
  CHECK_REFUSED(overwrite_refusal(overwrite(2, {0}, 0)), "its change is cut off");
  CHECK_REFUSED(overwrite_refusal(overwrite(2, {0, 1}, 1)), "its change is cut off");
  CHECK_REFUSED(overwrite_refusal(overwrite(2, {0, 1}, 3)), "more bytes than it has");
  CHECK_REFUSED(overwrite_refusal(overwrite(3001, {}, 0)), "more bytes change than it has");
  CHECK_REFUSED(overwrite_refusal(overwrite(0xffffffff, {}, 0)), "more bytes change than it has");
}

void places_out_of_range_are_refused_and_nothing_is_written() {
  const Bytes before = noise(5000, 2);
  for (const uint32_t place : {3000u, 3001u, 4000u, 0x7fffffffu, 0xffffffffu}) {
    Bytes plain;
    add_word(plain, 2);
    add_word(plain, 5);
    add_word(plain, place);
    plain.insert(plain.end(), {1, 2});
    Bytes after;
    CHECK_REFUSED(refusal(Frame().raw(plain).end(), DeltaEncoding::kOverwrite, before, 1000, 3000, &after),
                  "a byte behind its end changes");
    CHECK(after == before);
  }
  // A tensor that the file does not hold, in part or at all.
  for (const uint64_t offset : {uint64_t{4000}, uint64_t{5000}, uint64_t{1} << 40}) {
    for (const DeltaEncoding encoding : {DeltaEncoding::kXor, DeltaEncoding::kOverwrite}) {
      Bytes after;
      const Bytes change =
          encoding == DeltaEncoding::kXor ? Frame().repeat(1, 3000).end() : Frame().raw({0, 0, 0, 0}).end();
      CHECK_REFUSED(refusal(change, encoding, before, offset, 3000, &after), "its file is cut off");
      CHECK(after == before);
    }
  }
}

// Four bytes make 128 KiB, and could make gigabytes: no more is ever decompressed than the tensor has.
void bombs_do_not_go_off() {
  const Bytes before = noise(5000, 3);
  Frame bomb;
  for (int i = 0; i < 100000; i++) bomb.repeat(0xff, 1 << 17);
  const Bytes bytes = bomb.end();
  CHECK_REFUSED(refusal(bytes, DeltaEncoding::kXor, before, 0, 5000), "more bytes than it has");
  // Its count is 0xffffffff.
  CHECK_REFUSED(refusal(bytes, DeltaEncoding::kOverwrite, before, 0, 5000), "more bytes change than it has");
  // A window of 2 TiB, which the library would allocate.
  CHECK_REFUSED(refusal(Frame(31).repeat(1, 5000).end(), DeltaEncoding::kXor, before, 0, 5000),
                "it does not decompress");
}

void what_breaks_off_or_is_changed_is_never_read_out_of_bounds() {
  const Bytes before = noise(60000, 4);
  Bytes now = before;
  for (size_t i = 0; i < now.size(); i += 37) now[i] ^= static_cast<uint8_t>(i | 1);
  for (const DeltaEncoding encoding : {DeltaEncoding::kXor, DeltaEncoding::kOverwrite}) {
    const Bytes change = compressed(encoding == DeltaEncoding::kXor ? xor_of(before, now) : overwrite_of(before, now));
    CHECK(refusal(change, encoding, before, 0, before.size()).empty());
    for (size_t size = 0; size < change.size(); size += 1 + change.size() / 97) {
      CHECKF(!refusal(Bytes(change.begin(), change.begin() + static_cast<ptrdiff_t>(size)), encoding, before, 0,
                      before.size())
                  .empty(),
             "the first %zu of %zu bytes", size, change.size());
    }
    // Any byte changed: refused, or of another sum; the sanitizers see the rest.
    std::mt19937 random(5);
    int silent = 0;
    for (int i = 0; i < 300; i++) {
      Bytes broken = change;
      broken[random() % broken.size()] ^= static_cast<uint8_t>(1 + random() % 255);
      Bytes after;
      if (refusal(broken, encoding, before, 0, before.size(), &after).empty() && after == now) silent++;
    }
    CHECKF(silent < 30, "%d of 300 changes make no difference", silent);
  }
  const Bytes no_frame(1000, 0x5a);
  CHECK_REFUSED(refusal(no_frame, DeltaEncoding::kXor, before, 0, 100), "it does not decompress");
}

void the_first_that_is_refused_is_named_and_all_threads_end() {
  const Bytes before = noise(64000, 6);
  const File file(before);
  const Bytes good = Frame().repeat(1, 1000).end();
  const Bytes bad = Frame().repeat(1, 999).end();
  for (const int threads : {1, 4}) {
    std::vector<TensorDelta> deltas;
    for (uint64_t i = 0; i < 64; i++) {
      const Bytes& change = i == 17 ? bad : good;
      deltas.push_back({file.fd(), i * 1000, 1000, change.data(), change.size()});
    }
    std::string why;
    try {
      apply_deltas(deltas, DeltaEncoding::kXor, DeltaChecksum::kXxh3, threads);
    } catch (const std::runtime_error& error) {
      why = error.what();
    }
    CHECKF(why == "17: its change holds fewer bytes than it has", "%s", why.c_str());
    // One thread goes in order, and stops there.
    const Bytes now = file.bytes();
    if (threads == 1)
      CHECK(std::equal(now.begin() + 18000, now.end(), before.begin() + 18000) && now[16999] != before[16999]);
  }
  // A file that cannot be written to.
  const File sealed(before);
  const int fd = open(("/proc/self/fd/" + std::to_string(sealed.fd())).c_str(), O_RDONLY | O_CLOEXEC);
  std::string why;
  try {
    apply_deltas({{fd, 0, 1000, good.data(), good.size()}}, DeltaEncoding::kXor, DeltaChecksum::kXxh3, 1);
  } catch (const std::runtime_error& error) {
    why = error.what();
  }
  CHECKF(why.find("0: pwrite: ") == 0, "%s", why.c_str());
  close(fd);
}

// A change of all bytes is five times as long as the tensor, and is never in memory as a whole.
void memory_is_that_of_pieces() {
  constexpr size_t kSize = 6 * kMiB;
  const Bytes before(kSize, 1);
  Bytes rising(4 + 5 * kSize), falling(4 + 5 * kSize);
  for (uint32_t i = 0; i < kSize; i++) {
    const auto put = [](Bytes& out, size_t at, uint32_t word) { std::memcpy(out.data() + at, &word, sizeof word); };
    if (i == 0) put(rising, 0, kSize), put(falling, 0, kSize);
    put(rising, 4 + 4 * size_t{i}, i);
    put(falling, 4 + 4 * size_t{i}, kSize - 1 - i);
    rising[4 + 4 * kSize + i] = falling[4 + 5 * kSize - 1 - i] = static_cast<uint8_t>(i * 7 + i / 251);
  }
  Bytes after(rising.end() - kSize, rising.end());
  for (const bool rises : {true, false}) {
    const Bytes change = compressed(rises ? rising : falling);
    const File file(before);
    const std::vector<TensorDelta> deltas = {{file.fd(), 0, kSize, change.data(), change.size()}};
    const size_t held = allocated;
    most_allocated = held;
    apply_deltas(deltas, DeltaEncoding::kOverwrite, DeltaChecksum::kXxh3, 1);
    const size_t most = most_allocated - held;
    CHECKF(most < (rises ? 2 * kMiB : kSize + kMiB), "%zu bytes at once for a tensor of %zu", most, kSize);
    CHECK(file.bytes() == after);
  }
}

// Of a position that comes twice, the last counts; in any order.
void positions_may_come_in_any_order() {
  const size_t size = 2 * kMiB + 100;
  std::vector<uint32_t> at = {5, 2 * kMiB + 99, 0, kMiB, 5, kMiB - 1, 5};
  Bytes expected(size, 1);
  Bytes plain;
  add_word(plain, static_cast<uint32_t>(at.size()));
  for (const uint32_t place : at) add_word(plain, place);
  for (uint8_t i = 0; i < at.size(); i++) {
    plain.push_back(static_cast<uint8_t>(100 + i));
    expected[at[i]] = static_cast<uint8_t>(100 + i);
  }
  const File file(Bytes(size, 1));
  const Bytes change = Frame().raw(plain).end();
  const auto sums = apply_deltas({{file.fd(), 0, size, change.data(), change.size()}}, DeltaEncoding::kOverwrite,
                                 DeltaChecksum::kXxh3, 1);
  CHECK(file.bytes() == expected);
  CHECK(sums[0] == xxh3(expected));
}

}  // namespace

int main() {
  checksums_are_those_of_the_specifications();
  for (const DeltaEncoding encoding : {DeltaEncoding::kXor, DeltaEncoding::kOverwrite}) {
    for (const int threads : {1, 3, 32}) tensors_become_what_they_are_to_be(encoding, threads);
  }
  a_change_may_be_of_several_frames_and_of_no_bytes();
  sizes_that_lie_are_refused();
  places_out_of_range_are_refused_and_nothing_is_written();
  positions_may_come_in_any_order();
  memory_is_that_of_pieces();
  bombs_do_not_go_off();
  what_breaks_off_or_is_changed_is_never_read_out_of_bounds();
  the_first_that_is_refused_is_named_and_all_threads_end();
  return refit::test::finish("delta_test");
}
