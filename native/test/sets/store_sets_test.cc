// Two sets of weights: addresses, copies between them, memory that one of them gives back, and the slots of adapters,
// which exist once.
#include <cstring>
#include <new>
#include <thread>
#include <vector>

#include "core/fault.h"
#include "core/store.h"
#include "test/check.h"

using namespace refit;

namespace {

CoreConfig config(int ranks) {
  CoreConfig c;
  c.ranks = ranks;
  c.sets = 2;
  c.params = {{"a", 97, 61, DType::kBFloat16}, {"adapters.x", 33, 7, DType::kFloat32}, {"b", 5, 301, DType::kFloat32}};
  return c;
}

std::vector<uint8_t> bytes_of(const Store& store, int rank, int param, int set) {
  const Param& shape = store.shape(param);
  std::vector<uint8_t> out(static_cast<size_t>(shape.rows * shape.cols) * size_of(shape.dtype));
  store.read(rank, param, 0, 0, shape.rows, shape.cols, out.data(), set);
  return out;
}

void each_set_has_weights_of_its_own_and_adapters_are_shared() {
  Pool pool(2);
  Store store(config(2));
  store.populate(pool);
  for (int rank = 0; rank < 2; rank++) {
    CHECK(store.param(rank, 0, 0) != store.param(rank, 0, 1));
    CHECK(store.param(rank, 2, 0) != store.param(rank, 2, 1));
    CHECK(store.param(rank, 1, 0) == store.param(rank, 1, 1));
  }
  store.scramble(7, pool, 0);
  const auto first = bytes_of(store, 1, 2, 0);
  store.scramble(8, pool, 1);
  CHECK(bytes_of(store, 1, 2, 0) == first);
  CHECK(bytes_of(store, 1, 2, 1) != first);
  store.scramble(7, pool, 1);
  for (int rank = 0; rank < 2; rank++) {
    for (const int param : {0, 2}) CHECK(bytes_of(store, rank, param, 0) == bytes_of(store, rank, param, 1));
  }
  CHECK(store.bytes() > store.set_bytes());
}

void a_copy_changes_the_rectangles_of_the_other_set_alone() {
  Pool pool(1);
  Store store(config(2));
  store.scramble(1, pool, 0);
  store.scramble(2, pool, 1);
  const auto from = bytes_of(store, 1, 0, 0), before = bytes_of(store, 1, 0, 1), other = bytes_of(store, 0, 0, 1);
  Rect rect;
  rect.tensor = 0, rect.rank = 1, rect.param = 0, rect.rows = 20, rect.cols = 13, rect.dst_row = 70, rect.dst_col = 48;
  store.copy({rect}, 0, 1, pool);
  const auto after = bytes_of(store, 1, 0, 1);
  bool exact = true;
  for (int r = 0; r < 97; r++) {
    for (int c = 0; c < 61; c++) {
      const bool inside = r >= 70 && r < 90 && c >= 48;
      exact = exact && std::memcmp(&after[(r * 61 + c) * 2], &(inside ? from : before)[(r * 61 + c) * 2], 2) == 0;
    }
  }
  CHECK(exact);
  CHECK(bytes_of(store, 0, 0, 1) == other);
  CHECK(bytes_of(store, 1, 0, 0) == from);
}

void one_set_gives_its_memory_back_while_the_other_is_read() {
  Pool pool(2), beside(1);
  Store store(config(2));
  store.populate(pool);
  store.scramble(3, pool, 1);
  const auto kept = bytes_of(store, 0, 2, 1);
  const void* const address = store.param(0, 2, 0);
  std::thread dropper([&] { CHECK(store.drop(0) > 0); });
  for (int i = 0; i < 50; i++) CHECK(bytes_of(store, 0, 2, 1) == kept);
  dropper.join();
  CHECK(store.dropped(0) && !store.dropped(1));
  CHECK(store.drop(0) == 0);
  // A release and a resume are about the set that has memory, and the adapters.
  std::memset(store.param(1, 1), 9, 33 * 7 * 4);
  store.release(true, pool);
  CHECK(store.resume(pool));
  CHECK(store.dropped(0) && bytes_of(store, 0, 2, 1) == kept);
  CHECK(bytes_of(store, 1, 1, 1) == std::vector<uint8_t>(33 * 7 * 4, 9));
#ifdef REFIT_FAULTS
  fault::arm(fault::Point::kAlloc, 2, fault::Action::kFail, 0);
  CHECK_THROWS(store.restore(0, beside), std::bad_alloc);
  fault::disarm();
  CHECK(store.dropped(0));
#endif
  store.restore(0, beside);
  CHECK(!store.dropped(0) && store.param(0, 2, 0) == address);
  CHECK(bytes_of(store, 0, 2, 0) == std::vector<uint8_t>(5 * 301 * 4, 0));
}

}  // namespace

int main() {
  each_set_has_weights_of_its_own_and_adapters_are_shared();
  a_copy_changes_the_rectangles_of_the_other_set_alone();
  one_set_gives_its_memory_back_while_the_other_is_read();
  return refit::test::finish("store_sets_test");
}
