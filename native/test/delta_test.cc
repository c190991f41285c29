// Changes of tensors in files: their results, checksums and memory.
#include "test/delta_common.h"

using namespace refit;
using namespace refit::test::delta_world;

namespace {

// Bytes that C++ has allocated in this process.
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

void checksums_agree_with_the_specifications() {
  const Bytes all = sanity(5000);
  for (const Vector& vector : kVectors) {
    const Bytes bytes(all.begin(), all.begin() + static_cast<ptrdiff_t>(vector.size));
    CHECKF(xxh3(bytes) == vector.xxh3, "%zu bytes: %s", vector.size, xxh3(bytes).c_str());
    // The same in pieces of many sizes.
    for (const size_t piece : {size_t{1}, size_t{63}, size_t{64}, size_t{65}, size_t{1024}, size_t{1500}}) {
      Xxh3 hash;
      for (size_t at = 0; at < bytes.size(); at += piece)
        hash.update(bytes.data() + at, std::min(piece, bytes.size() - at));
      CHECKF(hash.hex() == vector.xxh3, "%zu bytes in pieces of %zu", vector.size, piece);
    }
    // An empty change returns the checksum of the old bytes.
    const File file(bytes);
    const Bytes none = compressed(Bytes(bytes.size()));
    for (const DeltaChecksum kind : {DeltaChecksum::kXxh3, DeltaChecksum::kAdler32}) {
      const auto sums =
          apply_deltas({{file.fd(), 0, bytes.size(), none.data(), none.size()}}, DeltaEncoding::kXor, kind, 1);
      CHECK(sums.size() == 1 && sums[0] == (kind == DeltaChecksum::kXxh3 ? vector.xxh3 : vector.adler32));
    }
  }
  // Sums near overflow: the most bytes that fit between two reductions, and more.
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

// Tensors of all sizes in one file, changed by several threads. The gaps between them must not change.
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
    // Changes some bytes, the first and the last included. In one tensor whole pieces stay unchanged.
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

void a_change_may_have_several_frames_or_no_bytes() {
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

// Four bytes decompress to 128 KiB here and could decompress to gigabytes. No more than the size of the tensor is ever
// decompressed. A change of all bytes is five times as long as the tensor and is never in memory as a whole.
void memory_is_bounded_by_pieces() {
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

// If a position occurs twice, the last value counts.
void positions_may_be_in_any_order() {
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
  checksums_agree_with_the_specifications();
  for (const DeltaEncoding encoding : {DeltaEncoding::kXor, DeltaEncoding::kOverwrite}) {
    for (const int threads : {1, 3, 32}) tensors_become_what_they_are_to_be(encoding, threads);
  }
  a_change_may_have_several_frames_or_no_bytes();
  positions_may_be_in_any_order();
  memory_is_bounded_by_pieces();
  return refit::test::finish("delta_test");
}
