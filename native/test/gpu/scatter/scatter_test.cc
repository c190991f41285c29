// The batched scatter against a plain loop over elements. Sources are allocated to the byte, so memcheck sees a read
// outside of them; targets are in poisoned memory that is compared as a whole.
//   scatter_test [--quick] [--host] [--seed N]     --host: only what needs no GPU
#include "cuda/scatter/scatter.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "cuda/device/check.h"
#include "cuda/scatter/scatter_plan.h"
#include "test/check.h"
#include "test/gpu/scatter/scatter_cases.cuh"
#include "test/gpu/scatter/scatter_runs.cuh"
#include "test/gpu/scatter/scatter_world.cuh"

using namespace refit;
using namespace refit::cuda;

namespace {

// --- on the host: the tiles cover the copies, each element once

struct HostLists {
  std::vector<uint32_t> first[2];
  std::vector<ScatterCopy> copies[2];
  ScatterLists lists;
  explicit HostLists(uint32_t capacity) {
    for (int i = 0; i < 2; i++) {
      first[i].resize(capacity + 1);
      copies[i].resize(capacity);
      ScatterList& list = i == 0 ? lists.threads : lists.bulk;
      list = ScatterList{first[i].data(), copies[i].data(), capacity, 0, 0};
    }
  }
};

// Does a block's work for each tile, into `target` (which begins at address `base`), and counts the writes.
void run_tiles(const ScatterList& list, uint64_t base, std::vector<uint16_t>& target, std::vector<int>& writes) {
  uint32_t copy = 0;
  for (uint32_t tile = 0; tile < list.tiles; tile++) {
    while (list.first_tile[copy + 1] <= tile) copy++;
    const ScatterCopy& c = list.copies[copy];
    const TileRange range = tile_range(c, tile - list.first_tile[copy]);
    CHECKF(range.rows > 0 && range.slots > 0 && range.row + range.rows <= c.rows && range.slot + range.slots <= c.slots,
           "tile %u of copy %u", tile, copy);
    for (uint32_t r = range.row; r < range.row + range.rows; r++) {
      const uint64_t dst = c.dst + r * static_cast<uint64_t>(c.dst_row);
      for (uint32_t s = range.slot; s < range.slot + range.slots; s++) {
        SlotRange slot = slot_range(dst, c.cols, s);
        if (c.path == ScatterPath::kTranspose) {
          slot = {s * 8, s * 8, std::min<int64_t>(s * 8 + 8, static_cast<int64_t>(c.cols))};
        }
        if (c.path == ScatterPath::kVector) CHECK(slot.to - slot.from == 8 && (dst + slot.first * 2) % 16 == 0);
        for (int64_t i = slot.from; i < slot.to; i++) {
          const uint8_t* from = reinterpret_cast<const uint8_t*>(c.src) + r * c.src_row + i * c.src_col;
          if (c.path == ScatterPath::kVector && i == slot.from) CHECK(reinterpret_cast<uintptr_t>(from) % 16 == 0);
          uint32_t bits = 0;
          std::memcpy(&bits, from, size_of(c.dtype));
          const size_t at = (dst + static_cast<uint64_t>(i) * 2 - base) / 2;
          target[at] = static_cast<uint16_t>(convert_bits(c.dtype, kElementType, bits));
          writes[at]++;
        }
      }
    }
  }
}

void tiles_cover_every_element_once(uint64_t seed) {
  Random random(seed);
  int64_t end = 0;
  std::vector<Case> cases;
  const int count = static_cast<int>(1 + random.below(30));
  for (int i = 0; i < count; i++) cases.push_back(random_case(random, 4000, end));
  std::vector<uint16_t> target(static_cast<size_t>(end) + 8, kPoison);
  // The target begins at 16 bytes and the sources at 256, as on a GPU.
  const uint64_t misplaced = reinterpret_cast<uintptr_t>(target.data()) % 16 / 2;
  uint16_t* base = target.data() + (8 - misplaced) % 8;
  std::vector<Copy2d> copies;
  for (Case& c : cases) {
    c.copy.src = c.bytes.data() + c.offset;
    c.copy.dst = reinterpret_cast<Element*>(base + c.at);
    copies.push_back(c.copy);
  }
  copies.insert(copies.begin() + random.below(count), Copy2d{nullptr, nullptr, 0, 5, 0, 0, 5, cuda::kElementType});
  const uint32_t tile = 1024u << random.below(7);
  const bool bulk = random.chance(2);
  std::vector<int> writes(target.size());
  size_t from = 0;
  while (from < copies.size()) {
    HostLists host(static_cast<uint32_t>(1 + random.below(20)));
    const size_t next = plan_scatter(copies, from, tile, bulk, host.lists);
    CHECKF(next > from, "seed %lu", static_cast<unsigned long>(seed));
    if (next <= from) return;
    from = next;
    for (const ScatterList* list : {&host.lists.threads, &host.lists.bulk}) {
      run_tiles(*list, reinterpret_cast<uintptr_t>(target.data()), target, writes);
    }
    for (uint32_t i = 0; i < host.lists.bulk.count; i++) {
      const ScatterCopy& c = host.lists.bulk.copies[i];
      CHECK(bulk && c.path == ScatterPath::kVector && c.tile_rows * c.tile_slots * 16 <= kBulkBytes);
    }
  }
  const auto expected = expected_target(cases, end);
  const auto offset = static_cast<size_t>(base - target.data());
  for (const Case& c : cases) {
    for (int64_t r = 0; r < c.copy.rows; r++) {
      for (int64_t k = 0; k < c.copy.cols; k++) {
        const auto at = static_cast<size_t>(c.at + r * c.copy.dst_cols + k);
        CHECKF(writes[offset + at] == 1, "seed %lu, %s: element %ld, %ld written %d times",
               static_cast<unsigned long>(seed), describe(c).c_str(), long(r), long(k), writes[offset + at]);
      }
    }
  }
  for (size_t i = 0; i < expected.size(); i++) {
    CHECKF(target[offset + i] == expected[i], "seed %lu: element %zu", static_cast<unsigned long>(seed), i);
  }
}

void long_flat_copies_have_full_tiles() {
  HostLists host(8);
  const Copy2d flat{
      reinterpret_cast<void*>(4096), reinterpret_cast<Element*>(8192), 4096, 4096, 8192, 2, 4096, cuda::kElementType};
  Copy2d slice = flat;
  slice.cols = 2048;
  plan_scatter({flat, slice}, 0, 64 << 10, false, host.lists);
  CHECK(host.lists.threads.count == 2 && host.lists.threads.copies[0].rows == 1);
  CHECK(host.lists.threads.first_tile[1] == (32u << 20) / (64u << 10));
  CHECK(host.lists.threads.tiles == (48u << 20) / (64u << 10));
  CHECK(host.lists.threads.copies[1].tile_rows == 16);
}

// --- on the GPU

// In addition to the defaults: no bulk copies, tiles of few slots, tiles of more slots than most copies have.
struct Variant {
  uint32_t tile_bytes;
  bool bulk;
};
constexpr Variant kVariants[] = {
    {Scatter::kTileBytes, true}, {Scatter::kTileBytes, false}, {1 << 10, false}, {128 << 10, true}};

void random_lists_arrive(uint64_t seed, int count, int64_t most, Where where) {
  Random random(seed);
  Fixture f;
  for (int i = 0; i < count; i++) f.cases.push_back(random_case(random, most, f.end));
  f.place(where);
  for (const auto& [tile_bytes, bulk] : kVariants) {
    Scatter scatter(tile_bytes, bulk);
    f.poison();
    scatter.run(f.copies, nullptr, where == Where::kPinned);
    check(cudaDeviceSynchronize(), "scatter");
    char text[96];
    std::snprintf(text, sizeof text, "seed %lu, place %d, tiles of %u bytes, bulk %d", static_cast<unsigned long>(seed),
                  int(where), tile_bytes, int(bulk));
    f.compare(text);
  }
}

// Every bit pattern of both 16-bit types, and fp32 around every tie.
void every_value_converts() {
  Fixture f;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    for (const uint64_t offset : {uint64_t{0}, uint64_t{2}, uint64_t{7}}) {
      Case c;
      c.copy.dtype = dtype;
      c.offset = offset;
      std::vector<uint32_t> values;
      for (uint32_t high = 0; high < 65536; high++) {
        if (dtype != DType::kFloat32) {
          values.push_back(high);
          continue;
        }
        for (const uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) values.push_back(high << 16 | low);
      }
      c.bytes.resize(offset + values.size() * size_of(dtype));
      for (size_t i = 0; i < values.size(); i++) {
        std::memcpy(&c.bytes[offset + i * size_of(dtype)], &values[i], size_of(dtype));
      }
      c.copy.rows = 1;
      c.copy.cols = c.copy.dst_cols = static_cast<int64_t>(values.size());
      c.copy.src_col_bytes = static_cast<int64_t>(size_of(dtype));
      c.at = f.end + 3;
      f.end = c.at + c.extent();
      f.cases.push_back(std::move(c));
    }
  }
  f.place(Where::kGpu);
  f.poison();
  Scatter scatter;
  scatter.run(f.copies, nullptr);
  check(cudaDeviceSynchronize(), "scatter");
  f.compare("every value");
}

// More copies than one launch takes, and more lists than the ring holds, without a wait between them.
void long_and_many_lists_arrive(uint64_t seed, int count) {
  Random random(seed);
  Fixture f;
  // One source for all copies: many small rectangles, some without rows.
  const int64_t pool = 1 << 20;
  Case whole;
  whole.bytes.resize(pool);
  for (uint8_t& b : whole.bytes) b = static_cast<uint8_t>(random.next());
  Gpu source(pool);
  check(cudaMemcpy(source.data(), whole.bytes.data(), pool, cudaMemcpyHostToDevice), "cudaMemcpy");
  std::vector<Copy2d> copies;
  std::vector<int64_t> from, to;
  int64_t end = 0;
  for (int i = 0; i < count; i++) {
    Copy2d copy{};
    copy.dtype = cuda::kElementType;
    copy.rows = random.below(4);
    copy.cols = 1 + random.below(60);
    copy.src_col_bytes = 2;
    copy.src_row_bytes = 128;
    copy.dst_cols = 64;
    from.push_back(random.below(pool / 2 - 512) * 2);
    to.push_back(end);
    end += copy.rows * 64;
    copies.push_back(copy);
  }
  Gpu target(static_cast<size_t>(end) * 2);
  std::vector<uint16_t> expected(static_cast<size_t>(end), kPoison), got(expected.size());
  for (int i = 0; i < count; i++) {
    Copy2d& copy = copies[static_cast<size_t>(i)];
    copy.src = source.data() + from[static_cast<size_t>(i)];
    copy.dst = reinterpret_cast<Element*>(target.data()) + to[static_cast<size_t>(i)];
    for (int64_t r = 0; r < copy.rows; r++) {
      std::memcpy(&expected[static_cast<size_t>(to[static_cast<size_t>(i)] + r * 64)],
                  &whole.bytes[static_cast<size_t>(from[static_cast<size_t>(i)] + r * 128)],
                  static_cast<size_t>(copy.cols) * 2);
    }
  }
  for (const bool split : {false, true}) {
    check(cudaMemcpy(target.data(), std::vector<uint16_t>(expected.size(), kPoison).data(), expected.size() * 2,
                     cudaMemcpyHostToDevice),
          "cudaMemcpy");
    Scatter scatter;
    if (!split) {
      scatter.run(copies, nullptr);
    } else {
      for (size_t i = 0; i < copies.size(); i += copies.size() / 40 + 1) {
        scatter.run({copies.begin() + static_cast<int64_t>(i),
                     copies.begin() + static_cast<int64_t>(std::min(copies.size(), i + copies.size() / 40 + 1))},
                    nullptr);
      }
    }
    check(cudaDeviceSynchronize(), "scatter");
    check(cudaMemcpy(got.data(), target.data(), got.size() * 2, cudaMemcpyDeviceToHost), "cudaMemcpy");
    size_t wrong = 0, first = 0;
    for (size_t i = got.size(); i-- > 0;) {
      if (got[i] != expected[i]) wrong++, first = i;
    }
    CHECKF(wrong == 0, "%d copies%s: %zu of %zu elements differ, the first at %zu: expected %04x, got %04x", count,
           split ? " in 40 lists" : "", wrong, got.size(), first, expected[first], got[first]);
  }
}

// Tiles of full size on every block, so that tails and the counter matter.
void a_large_list_arrives(uint64_t seed) {
  Random random(seed);
  Fixture f;
  for (int i = 0; i < 6; i++) {
    Case c;
    c.copy.dtype = i == 5 ? DType::kFloat32 : cuda::kElementType;
    const auto element = static_cast<int64_t>(size_of(c.copy.dtype));
    c.copy.rows = 1000 + random.below(500);
    c.copy.cols = i < 2 ? 4096 : 2048 + random.below(2048);
    c.copy.src_col_bytes = element;
    c.copy.src_row_bytes = (i % 2 == 0 ? c.copy.cols : 4608) * element;
    c.copy.dst_cols = i < 3 ? c.copy.cols : 5000;
    c.offset = static_cast<uint64_t>(i == 2 ? 6 : 0);
    c.bytes.resize(c.offset + static_cast<size_t>(c.copy.rows * c.copy.src_row_bytes));
    for (size_t k = 0; k + 8 <= c.bytes.size(); k += 8) {
      const uint64_t z = random.next();
      std::memcpy(&c.bytes[k], &z, 8);
    }
    c.at = f.end + 8 - f.end % 8;
    f.end = c.at + c.extent();
    f.cases.push_back(std::move(c));
  }
  f.place(Where::kGpu);
  for (const auto& [tile_bytes, bulk] : kVariants) {
    Scatter scatter(tile_bytes, bulk);
    f.poison();
    scatter.run(f.copies, nullptr);
    check(cudaDeviceSynchronize(), "scatter");
    f.compare("large, tiles of " + std::to_string(tile_bytes) + (bulk ? ", bulk" : ""));
  }
}

}  // namespace

int main(int argc, char** argv) {
  bool quick = false, host_only = false;
  uint64_t seed = 1;
  for (int i = 1; i < argc; i++) {
    if (std::strcmp(argv[i], "--quick") == 0) quick = true;
    if (std::strcmp(argv[i], "--host") == 0) host_only = true;
    if (std::strcmp(argv[i], "--seed") == 0 && i + 1 < argc) seed = std::strtoull(argv[++i], nullptr, 10);
  }
  std::printf("seed %lu\n", static_cast<unsigned long>(seed));
  long_flat_copies_have_full_tiles();
  for (uint64_t i = 0; i < (quick ? 10 : 150); i++) {
    tiles_cover_every_element_once(seed + i);
    runs_and_the_rest_are_the_copies(seed + i);
  }
  if (host_only) return test::finish("scatter_test --host");
  try {
    for (uint64_t i = 0; i < (quick ? 2 : 12); i++) {
      random_lists_arrive(seed + 100 + i, quick ? 12 : 60, quick ? 1500 : 20000, Where::kGpu);
      random_lists_arrive(seed + 200 + i, quick ? 6 : 30, quick ? 1500 : 20000, Where::kPinned);
    }
    for (uint64_t i = 0; i < (quick ? 5 : 30); i++) long_runs_arrive(seed + i, false);
    neighbours_in_memory_arrive();
    long_and_many_lists_arrive(seed, quick ? 300 : 60000);
    if (!quick) {
      every_value_converts();
      a_large_list_arrives(seed);
    }
    int gpus = 0, reach = 0;
    check(cudaGetDeviceCount(&gpus), "cudaGetDeviceCount");
    if (gpus > 1) check(cudaDeviceCanAccessPeer(&reach, 0, 1), "cudaDeviceCanAccessPeer");
    if (reach != 0) {
      check(cudaDeviceEnablePeerAccess(1, 0), "cudaDeviceEnablePeerAccess");
      for (uint64_t i = 0; i < 3; i++) {
        random_lists_arrive(seed + 300 + i, 40, 20000, Where::kPeer);
        random_lists_arrive(seed + 400 + i, 60, 20000, Where::kMixed);
      }
      for (uint64_t i = 0; i < 15; i++) long_runs_arrive(seed + i, true);
    } else {
      std::printf("one GPU, or no peer access: sources on a peer were not tried\n");
    }
  } catch (const std::exception& e) {
    CHECKF(false, "%s", e.what());
  }
  return test::finish("scatter_test");
}
