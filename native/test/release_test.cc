// Memory that is released and resumed: addresses, contents, and calls that are refused in between. The system must
// really get the memory back.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/device.h"
#include "core/fault.h"
#include "core/store.h"
#include "cpu/kv_cache.h"
#include "test/check.h"

using namespace refit;

namespace {

// Bytes of a range that are in memory.
size_t resident(const void* data, size_t bytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const auto from = reinterpret_cast<uintptr_t>(data) / page * page;
  const size_t length = reinterpret_cast<uintptr_t>(data) + bytes - from;
  std::vector<unsigned char> states((length + page - 1) / page);
  CHECK(mincore(reinterpret_cast<void*>(from), length, states.data()) == 0);
  size_t count = 0;
  for (const unsigned char state : states) count += state & 1;
  return count * page;
}

CoreConfig config(DType dtype, int ranks, std::vector<Param> params) {
  CoreConfig c;
  c.ranks = ranks;
  c.params = std::move(params);
  for (Param& param : c.params) param.dtype = dtype;
  return c;
}

const std::vector<Param> kParams = {{"a", 1000, 777}, {"b", 3, 5}, {"empty", 0, 7}, {"c", 4096, 333}};

std::vector<std::vector<uint8_t>> contents(const Store& store) {
  std::vector<std::vector<uint8_t>> all;
  for (int rank = 0; rank < store.ranks(); rank++) {
    for (int p = 0; p < store.params(); p++) {
      const Param& shape = store.shape(p);
      auto& bytes = all.emplace_back(shape.rows * shape.cols * size_of(shape.dtype));
      if (!bytes.empty()) store.read(rank, p, 0, 0, shape.rows, shape.cols, bytes.data());
    }
  }
  return all;
}

void weights_are_released_and_resumed_at_their_addresses() {
  Pool pool(2);
  for (const bool keep : {false, true}) {
    Store store(config(DType::kBFloat16, 3, kParams));
    store.populate(pool);
    store.scramble(7, pool);
    const auto before = contents(store);
    const void* first = store.param(0, 0);
    const uint64_t given = store.release(keep, pool);
    CHECKF(given == store.bytes(), "%lu of %lu", static_cast<unsigned long>(given),
           static_cast<unsigned long>(store.bytes()));
    CHECK(store.released());
    CHECK(store.release(keep, pool) == 0);
    for (int rank = 0; rank < 3; rank++) CHECK(resident(store.param(rank, 0), 2000 * 777) == 0);
    CHECK(store.resume(pool) == keep);
    CHECK(!store.released());
    CHECK(store.param(0, 0) == first);
    CHECK(resident(store.param(2, 3), 4096 * 333 * 2) >= 4096 * 333 * 2);
    const auto after = contents(store);
    if (keep) {
      CHECK(after == before);
    } else {
      bool zero = true;
      for (const auto& bytes : after) {
        for (const uint8_t byte : bytes) zero = zero && byte == 0;
      }
      CHECK(zero);
    }
    CHECK(store.resume(pool));
  }
}

// A copy that is not freed would make the process grow.
void a_hundred_releases_leak_no_memory() {
  Pool pool(2);
  Store store(config(DType::kFloat32, 2, kParams));
  store.populate(pool);
  const auto pages = [] {
    long total = 0, rss = 0;
    std::FILE* file = std::fopen("/proc/self/statm", "r");
    CHECK(file != nullptr && std::fscanf(file, "%ld %ld", &total, &rss) == 2);
    std::fclose(file);
    return rss;
  };
  long before = 0;
  for (int i = 0; i < 100; i++) {
    store.scramble(i, pool);
    store.release(i % 2 == 0, pool);
    store.resume(pool);
    if (i == 9) before = pages();
  }
  const long grown = pages() - before;
  CHECKF(grown * sysconf(_SC_PAGESIZE) < static_cast<long>(store.bytes()) / 4, "%ld pages more", grown);
}

#ifdef REFIT_FAULTS
void a_lack_of_memory_changes_nothing() {
  Pool pool(2);
  Store store(config(DType::kBFloat16, 3, kParams));
  store.populate(pool);
  store.scramble(3, pool);
  const auto before = contents(store);
  for (int at = 1; at <= 3; at++) {
    fault::arm(fault::Point::kAlloc, at, fault::Action::kFail, 0);
    CHECK_THROWS(store.release(true, pool), std::bad_alloc);
    CHECK(!store.released());
    CHECK(contents(store) == before);
  }
  store.release(true, pool);
  for (int at = 1; at <= 3; at++) {
    fault::arm(fault::Point::kAlloc, at, fault::Action::kFail, 0);
    CHECK_THROWS(store.resume(pool), std::bad_alloc);
    CHECK(store.released());
    for (int rank = 0; rank < 3; rank++) CHECK(resident(store.param(rank, 0), 2000 * 777) == 0);
  }
  fault::disarm();
  CHECK(store.resume(pool));
  CHECK(contents(store) == before);
}
#endif

void pages_of_the_kv_cache_are_released_and_written_again() {
  const int dim = 16, heads = 2;
  cpu::KvCache cache({2, 3, 64, 16, heads, dim}, DType::kFloat32);
  std::vector<float> k(heads * dim), v(heads * dim);
  for (int i = 0; i < heads * dim; i++) {
    k[i] = static_cast<float>(i) + 0.5f;
    v[i] = -static_cast<float>(i) - 0.25f;
  }
  const uint8_t* at = cache.k(1, 2, 63, 0);
  for (int turn = 0; turn < 3; turn++) {
    for (int page = 0; page < 64; page++) {
      for (int slot = 0; slot < 16; slot++) cache.write(1, 2, page, slot, k.data(), v.data());
    }
    float seen = 0;
    std::memcpy(&seen, cache.v(1, 2, 63, 1) + (15 * dim + 3) * sizeof(float), sizeof seen);
    CHECKF(seen == v[dim + 3], "%g", static_cast<double>(seen));
    // One layer of one rank was written.
    const uint64_t written = uint64_t{64} * heads * 2 * 16 * dim * sizeof(float);
    const uint64_t given = cache.release();
    // Huge pages make the number larger.
    CHECKF(given >= written && given <= cache.bytes(), "%lu of %lu", static_cast<unsigned long>(given),
           static_cast<unsigned long>(cache.bytes()));
    CHECK(resident(cache.k(1, 2, 0, 0), written) == 0);
    CHECK(cache.release() == 0);
    CHECK(cache.k(1, 2, 63, 0) == at);
  }
}

CoreConfig tiny() {
  CoreConfig c;
  c.threads = 2;
  c.dtype = DType::kFloat32;
  c.recipe.hidden = 8, c.recipe.layers = 1, c.recipe.heads = 2, c.recipe.kv_heads = 1, c.recipe.head_dim = 4;
  c.recipe.vocab = 16, c.recipe.tied_head = true, c.recipe.rope_inv_freq = {1.0, 0.01}, c.recipe.sparse_layers = {0};
  c.params = {{"embed", 16, 8},       {"layers.0.ln1", 8, 1},      {"layers.0.qkv", 16, 8}, {"layers.0.o", 8, 8},
              {"layers.0.ln2", 8, 1}, {"layers.0.gate_up", 12, 8}, {"layers.0.down", 8, 6}, {"norm", 8, 1}};
  for (Param& param : c.params) param.dtype = c.dtype;
  c.pages = 4;
  c.page_size = 4;
  return c;
}

// Callers see these messages if no earlier check refuses the call.
template <class Fn>
std::string refusal(Fn fn) {
  try {
    fn();
  } catch (const std::runtime_error& e) {
    return e.what();
  }
  return "";
}

void a_device_refuses_calls_that_touch_released_memory() {
  const auto device = make_cpu_device(tiny());
  device->scramble(5);
  std::vector<uint8_t> before(16 * 8 * 4), after(before.size());
  device->read(0, 0, 0, 0, 16, 8, before.data());
  const void* address = device->address(0, 7);
  StepBatch batch;
  StepResult result;

  CHECK(device->release_memory(kTagKvCache, false) == 0);  // nothing had been written
  CHECK(refusal([&] { device->step(batch, result); }) == "the memory of the KV cache is released; resume it first");
  device->read(0, 0, 0, 0, 16, 8, after.data());
  CHECK(before == after);
  CHECK(device->resume_memory(kTagKvCache));

  CHECK(device->release_memory(kTagWeights | kTagKvCache | kTagCudaGraph, true) > 0);
  CHECK(device->release_memory(kTagWeights, true) == 0);
  const std::string expected = "the memory of the weights is released; resume it first";
  CHECK(refusal([&] { device->step(batch, result); }) == expected);
  CHECK(refusal([&] { device->read(0, 0, 0, 0, 1, 1, after.data()); }) == expected);
  CHECK(refusal([&] { device->checksum({}, {}); }) == expected);
  CHECK(refusal([&] { device->scramble(1); }) == expected);
  CHECK(refusal([&] { device->write({}); }) == expected);
  CHECK(!device->resume_memory(kTagKvCache | kTagCudaGraph));
  CHECK(refusal([&] { device->step(batch, result); }) == expected);
  CHECK(device->resume_memory(kTagWeights));
  device->read(0, 0, 0, 0, 16, 8, after.data());
  CHECK(before == after);
  CHECK(device->address(0, 7) == address);

  device->release_memory(kTagWeights, false);
  CHECK(!device->resume_memory(kTagWeights));
  device->read(0, 0, 0, 0, 16, 8, after.data());
  CHECK(after == std::vector<uint8_t>(after.size()));
}

}  // namespace

int main() {
  weights_are_released_and_resumed_at_their_addresses();
  a_hundred_releases_leak_no_memory();
#ifdef REFIT_FAULTS
  a_lack_of_memory_changes_nothing();
#endif
  pages_of_the_kv_cache_are_released_and_written_again();
  a_device_refuses_calls_that_touch_released_memory();
  return refit::test::finish("release_test");
}
