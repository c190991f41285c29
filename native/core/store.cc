#include "core/store.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

namespace refit {
namespace {

size_t param_bytes(const Param& param) {
  size_t elements = 0;
  size_t bytes = 0;
  if (param.rows < 0 || param.cols < 0 ||
      __builtin_mul_overflow(static_cast<size_t>(param.rows), static_cast<size_t>(param.cols), &elements) ||
      __builtin_mul_overflow(elements, size_of(param.dtype), &bytes) || bytes > (size_t{1} << 62)) {
    throw std::invalid_argument("parameter " + param.name + ": impossible shape [" + std::to_string(param.rows) + ", " +
                                std::to_string(param.cols) + "]");
  }
  return bytes;
}

void copy(const Arena& from, Arena& to, Pool& pool) {
  constexpr size_t kStretch = 4 << 20;
  const auto stretches = static_cast<int64_t>((from.bytes() + kStretch - 1) / kStretch);
  pool.parallel_for(stretches, [&](int64_t index, int) {
    const size_t at = static_cast<size_t>(index) * kStretch;
    std::memcpy(to.data() + at, from.data() + at, std::min(kStretch, from.bytes() - at));
  });
}

}  // namespace

Store::Store(const CoreConfig& config) : shapes_(config.params) {
  size_t total = 0;
  for (const Param& shape : shapes_) {
    if (__builtin_add_overflow(total, Arena::padded(param_bytes(shape)), &total)) throw std::bad_alloc();
  }
  for (int rank = 0; rank < config.ranks; rank++) {
    Arena& arena = arenas_.emplace_back(total);
    for (const Param& shape : shapes_) {
      addresses_.push_back(static_cast<uint8_t*>(arena.carve(param_bytes(shape))));
    }
  }
}

void Store::populate(Pool& pool) {
  for (Arena& arena : arenas_) arena.populate(pool);
}

uint64_t Store::release(bool keep, Pool& pool) {
  if (released_) return 0;
  std::vector<Arena> copies;
  if (keep) {
    for (const Arena& arena : arenas_) copies.emplace_back(arena.bytes()).populate(pool);
    for (size_t i = 0; i < arenas_.size(); i++) copy(arenas_[i], copies[i], pool);
  }
  uint64_t bytes = 0;
  for (Arena& arena : arenas_) bytes += arena.release();
  kept_ = std::move(copies);
  released_ = true;
  return bytes;
}

bool Store::resume(Pool& pool) {
  if (!released_) return true;
  for (size_t i = 0; i < arenas_.size(); i++) {
    try {
      arenas_[i].resume(pool);
    } catch (...) {
      for (size_t before = 0; before < i; before++) arenas_[before].release();
      throw;
    }
  }
  released_ = false;
  if (kept_.empty()) return false;
  for (size_t i = 0; i < arenas_.size(); i++) copy(kept_[i], arenas_[i], pool);
  kept_.clear();
  return true;
}

uint64_t Store::bytes() const {
  uint64_t sum = 0;
  for (const Arena& arena : arenas_) sum += arena.bytes();
  return sum;
}

void Store::read(int rank, int param, int64_t row, int64_t col, int64_t rows, int64_t cols, uint8_t* out) const {
  const size_t element = size_of(shapes_[param].dtype);
  const size_t pitch = static_cast<size_t>(shapes_[param].cols) * element;
  const size_t width = static_cast<size_t>(cols) * element;
  const uint8_t* from =
      addresses_[address_index(rank, param)] + static_cast<size_t>(row) * pitch + static_cast<size_t>(col) * element;
  for (int64_t r = 0; r < rows; r++) {
    if (width > 0) std::memcpy(out + static_cast<size_t>(r) * width, from + static_cast<size_t>(r) * pitch, width);
  }
}

}  // namespace refit
