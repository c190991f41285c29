// Changes of tensors in files: hostile ones are refused, and nothing is written or read out of bounds.
#include "test/delta_common.h"

using namespace refit;
using namespace refit::test::delta_world;

namespace {

void wrong_sizes_are_refused() {
  const Bytes before = noise(5000, 1);
  const auto xor_refusal = [&](const Bytes& change) {
    return refusal(change, DeltaEncoding::kXor, before, 1000, 3000);
  };
  CHECK(xor_refusal(Frame().repeat(1, 3000).end()).empty());
  CHECK_REFUSED(xor_refusal(Frame().repeat(1, 2999).end()), "0: its change holds fewer bytes than it has");
  CHECK_REFUSED(xor_refusal(Frame().repeat(1, 3001).end()), "0: its change holds more bytes than it has");
  CHECK_REFUSED(xor_refusal({}), "fewer bytes");
  // A second frame after enough bytes.
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
  // A tensor that is partly or completely outside the file.
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

void decompression_bombs_are_refused() {
  const Bytes before = noise(5000, 3);
  Frame bomb;
  for (int i = 0; i < 100000; i++) bomb.repeat(0xff, 1 << 17);
  const Bytes bytes = bomb.end();
  CHECK_REFUSED(refusal(bytes, DeltaEncoding::kXor, before, 0, 5000), "more bytes than it has");
  // Read as an overwrite, its count is 0xffffffff.
  CHECK_REFUSED(refusal(bytes, DeltaEncoding::kOverwrite, before, 0, 5000), "more bytes change than it has");
  // A window of 2 TiB, which the library would allocate.
  CHECK_REFUSED(refusal(Frame(31).repeat(1, 5000).end(), DeltaEncoding::kXor, before, 0, 5000),
                "it does not decompress");
}

void cut_or_changed_deltas_are_never_read_out_of_bounds() {
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
    // Any changed byte causes a refusal or another result. The sanitizers see reads out of bounds.
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

void the_first_refused_delta_is_named_and_all_threads_end() {
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
    // One thread works in order and stops at the failure.
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

}  // namespace

int main() {
  wrong_sizes_are_refused();
  places_out_of_range_are_refused_and_nothing_is_written();
  decompression_bombs_are_refused();
  cut_or_changed_deltas_are_never_read_out_of_bounds();
  the_first_refused_delta_is_named_and_all_threads_end();
  return refit::test::finish("delta_refusals_test");
}
