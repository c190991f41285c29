// Changes of single elements, and the hashes of their tensors.
#include "core/write/element_patch.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>

#include "codec/blake2b.h"
#include "test/check.h"

using namespace refit;

namespace {

template <typename T>
std::vector<uint8_t> bytes_of(const std::vector<T>& values) {
  std::vector<uint8_t> out(values.size() * sizeof(T));
  if (!out.empty()) std::memcpy(out.data(), values.data(), out.size());
  return out;
}

struct Sent {
  std::vector<uint8_t> positions, values;
  ElementPatch patch;
};

// Ascending positions in each encoding that can hold them.
Sent sent(const std::vector<uint64_t>& at, const std::vector<uint16_t>& values, Positions encoding) {
  Sent out;
  std::vector<uint64_t> gaps;
  for (size_t i = 0; i < at.size(); i++) gaps.push_back(at[i] - (i == 0 ? 0 : at[i - 1] + 1));
  const auto narrow = [&](auto type, const std::vector<uint64_t>& from) {
    return bytes_of(std::vector<decltype(type)>(from.begin(), from.end()));
  };
  if (encoding == Positions::kInt32) out.positions = narrow(int32_t{}, at);
  if (encoding == Positions::kGap16) out.positions = narrow(uint16_t{}, gaps);
  if (encoding == Positions::kGap32) out.positions = narrow(uint32_t{}, gaps);
  if (encoding == Positions::kGap64) out.positions = bytes_of(gaps);
  out.values = bytes_of(values);
  out.patch = {encoding,          out.positions.data(), out.positions.size(), at.empty() ? 0 : at[0],
               out.values.data(), DType::kBFloat16,     values.size(),        false};
  return out;
}

std::string refusal(const std::vector<ElementPatch>& patches, uint64_t elements, DType dtype = DType::kBFloat16) {
  try {
    check_patches(patches, elements, dtype);
  } catch (const std::invalid_argument& e) {
    return e.what();
  }
  return "";
}

bool has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

// Blocks of a tensor that are patched separately equal the whole, in every encoding.
void every_encoding_sets_the_same_elements_whole_and_in_blocks() {
  std::mt19937_64 random(1);
  for (int round = 0; round < 50; round++) {
    const uint64_t elements = 1 + random() % 5000;
    std::vector<uint16_t> held(elements), expected;
    for (uint64_t i = 0; i < elements; i++) held[i] = static_cast<uint16_t>(i * 31 + 7);
    expected = held;
    std::vector<uint64_t> at;
    std::vector<uint16_t> values;
    uint64_t changed = 0;
    for (uint64_t i = 0; i < elements; i++) {
      if (random() % 3 != 0) continue;
      at.push_back(i);
      values.push_back(random() % 4 == 0 ? held[i] : static_cast<uint16_t>(random()));
      changed += values.back() != held[i];
      expected[i] = values.back();
    }
    for (const Positions encoding : {Positions::kInt32, Positions::kGap16, Positions::kGap32, Positions::kGap64}) {
      const Sent one = sent(at, values, encoding);
      CHECK(refusal({one.patch}, elements).empty());
      std::vector<uint16_t> got = held;
      uint64_t counted = 0;
      for (uint64_t first = 0; first < elements;) {
        const uint64_t count = std::min(elements - first, 1 + random() % 700);
        counted +=
            apply_patch(one.patch, first, count, DType::kBFloat16, reinterpret_cast<uint8_t*>(got.data() + first));
        first += count;
      }
      CHECK(got == expected);
      CHECK(counted == changed);
    }
  }
}

void a_range_needs_no_positions() {
  std::vector<uint16_t> held(10, 1);
  Sent one = sent({3, 4, 5}, {7, 8, 9}, Positions::kRange);
  CHECK(refusal({one.patch}, 10).empty());
  CHECK(apply_patch(one.patch, 0, 10, DType::kBFloat16, reinterpret_cast<uint8_t*>(held.data())) == 3);
  CHECK((held == std::vector<uint16_t>{1, 1, 1, 7, 8, 9, 1, 1, 1, 1}));
  CHECK(has(refusal({one.patch}, 5), "position 5 lies outside"));
  one.patch.position_bytes = 4;
  CHECK(has(refusal({one.patch}, 10), "4 bytes of positions for 3"));
}

void an_xor_patch_applied_twice_restores_the_bits() {
  std::vector<uint16_t> held{1, 2, 3, 4};
  const std::vector<uint16_t> before = held;
  Sent one = sent({1, 3}, {0xff00, 0x00ff}, Positions::kInt32);
  one.patch.is_xor = true;
  CHECK(apply_patch(one.patch, 0, 4, DType::kBFloat16, reinterpret_cast<uint8_t*>(held.data())) == 2);
  CHECK(held[1] == (2 ^ 0xff00) && held[3] == (4 ^ 0x00ff) && held[0] == 1 && held[2] == 3);
  apply_patch(one.patch, 0, 4, DType::kBFloat16, reinterpret_cast<uint8_t*>(held.data()));
  CHECK(held == before);
  CHECK(has(refusal({one.patch}, 4, DType::kFloat32), "another dtype"));
  // The same width does not make the bits the same.
  one.patch.dtype = DType::kFloat16;
  CHECK(has(refusal({one.patch}, 4, DType::kBFloat16), "another dtype"));
}

void wrong_patches_are_refused() {
  const Sent outside = sent({0, 4}, {1, 1}, Positions::kInt32);
  CHECK(has(refusal({outside.patch}, 4), "position 4 lies outside of its 4"));
  Sent negative = sent({0, 1}, {1, 1}, Positions::kInt32);
  const int32_t minus = -1;
  std::memcpy(negative.positions.data() + 4, &minus, 4);
  CHECK(has(refusal({negative.patch}, 4), "position -1 lies outside"));
  Sent twice = sent({1, 1}, {1, 2}, Positions::kInt32);
  CHECK(has(refusal({twice.patch}, 4), "position 1 comes twice"));
  const Sent one = sent({2}, {1}, Positions::kInt32), other = sent({2}, {2}, Positions::kGap32);
  CHECK(has(refusal({one.patch, other.patch}, 4), "position 2 comes twice"));
  Sent far = sent({0, 1}, {1, 2}, Positions::kGap64);
  std::memset(far.positions.data() + 8, 0xff, 8);
  CHECK(!refusal({far.patch}, 4).empty());
  Sent cut = sent({0, 1}, {1, 2}, Positions::kGap16);
  cut.patch.position_bytes = 2;
  CHECK(has(refusal({cut.patch}, 4), "2 bytes of positions for 2"));
  CHECK(has(refusal({one.patch}, 0), "outside of its 0"));
}

void values_of_other_dtypes_are_rounded() {
  std::vector<float> singles{1.0f, 1.00390625f * 1.001f, -3.5f};
  const std::vector<uint8_t> values = bytes_of(singles);
  std::vector<uint16_t> held(3);
  ElementPatch patch{Positions::kRange, nullptr, 0, 0, values.data(), DType::kFloat32, 3, false};
  CHECK(apply_patch(patch, 0, 3, DType::kBFloat16, reinterpret_cast<uint8_t*>(held.data())) == 3);
  for (int i = 0; i < 3; i++) CHECK(held[i] == float_to_bf16(singles[i]));
  const std::vector<uint8_t> halves = bytes_of(std::vector<uint16_t>{0x3c00, 0xc000, 0x0001});
  std::vector<float> wide(3);
  patch.values = halves.data();
  patch.dtype = DType::kFloat16;
  apply_patch(patch, 0, 3, DType::kFloat32, reinterpret_cast<uint8_t*>(wide.data()));
  CHECK(wide[0] == 1.0f && wide[1] == -2.0f && wide[2] == 0x1p-24f);
  const std::vector<uint8_t> brains = bytes_of(std::vector<uint16_t>{0x3f80, 0x4780, 0x3380});
  patch.values = brains.data();
  patch.dtype = DType::kBFloat16;
  apply_patch(patch, 0, 3, DType::kFloat16, reinterpret_cast<uint8_t*>(held.data()));
  CHECK(held[0] == 0x3c00 && held[1] == 0x7c00 && held[2] == 0x0001);
}

// Results of torch 2.13: hash_tensor of bfloat16 [1.5, 2.25, -3, 0, 1e-40, inf], of [1, 2, 255, 7] as uint8, of float32
// [1.1, 2.2].
void hashes_equal_those_of_torch() {
  std::vector<uint16_t> values;
  for (const float value : {1.5f, 2.25f, -3.0f, 0.0f, 1e-40f, std::numeric_limits<float>::infinity()})
    values.push_back(float_to_bf16(value));
  CHECK(torch_hash(bytes_of(values).data(), 6, DType::kBFloat16) == 17843824673595326464u);
  const std::vector<uint8_t> small{1, 2, 255, 7};
  CHECK(torch_hash(small.data(), 4) == 251);
  CHECK(torch_hash(bytes_of(std::vector<float>{1.1f, 2.2f}).data(), 2, DType::kFloat32) == 9218868437227405312u);
  CHECK(torch_hash(nullptr, 0) == 0 && torch_hash(nullptr, 0, DType::kFloat16) == 0);
}

std::string hex(const std::vector<uint8_t>& bytes) {
  std::string out;
  for (const uint8_t byte : bytes) {
    out += "0123456789abcdef"[byte >> 4];
    out += "0123456789abcdef"[byte & 15];
  }
  return out;
}

// Digests from Python's hashlib.
void blake2b_is_that_of_the_rfc() {
  const std::string abc = "abc";
  const auto* data = reinterpret_cast<const uint8_t*>(abc.data());
  CHECK(hex(blake2b(data, 3, 64)) ==
        "ba80a53f981c4d0d6a2797b69f12f6e94c212f14685ac4b74b12bb6fdbffa2d1"
        "7d87c5392aab792dc252d5de4533cc9518d38aa8dbf1925ab92386edd4009923");
  CHECK(hex(blake2b(data, 3, 16)) == "cf4ab791c62b8d2b2109c90275287816");
  CHECK(hex(blake2b(nullptr, 0, 16)) == "cae66941d9efbd404e4d88758ea67670");
  std::vector<uint8_t> many(1000);
  for (size_t i = 0; i < many.size(); i++) many[i] = static_cast<uint8_t>(i * 7);
  CHECK(hex(blake2b(many.data(), 128, 16)) == "06e5bcee475a6bf6d9b8a07c6f4ae80a");
  CHECK(hex(blake2b(many.data(), 129, 16)) == "2ec7e7bf8a8265ffd68aadd70ecd2b7e");
  CHECK(hex(blake2b(many.data(), 1000, 16)) == "8095a6f38992fefe1c12ac8ec5e70791");
}

}  // namespace

int main() {
  every_encoding_sets_the_same_elements_whole_and_in_blocks();
  a_range_needs_no_positions();
  an_xor_patch_applied_twice_restores_the_bits();
  wrong_patches_are_refused();
  values_of_other_dtypes_are_rounded();
  hashes_equal_those_of_torch();
  blake2b_is_that_of_the_rfc();
  return refit::test::finish("element_patch_test");
}
