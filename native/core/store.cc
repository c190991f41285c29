#include "core/store.h"

#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

namespace refit {
namespace {

size_t param_bytes(const Param& param, DType dtype) {
  size_t elements = 0;
  size_t bytes = 0;
  if (param.rows < 0 || param.cols < 0 ||
      __builtin_mul_overflow(static_cast<size_t>(param.rows), static_cast<size_t>(param.cols), &elements) ||
      __builtin_mul_overflow(elements, size_of(dtype), &bytes) || bytes > (size_t{1} << 62)) {
    throw std::invalid_argument("parameter " + param.name + ": impossible shape [" + std::to_string(param.rows) + ", " +
                                std::to_string(param.cols) + "]");
  }
  return bytes;
}

}  // namespace

Store::Store(const CoreConfig& config) : dtype_(config.dtype), shapes_(config.params) {
  size_t total = 0;
  for (const Param& shape : shapes_) {
    if (__builtin_add_overflow(total, Arena::padded(param_bytes(shape, dtype_)), &total)) throw std::bad_alloc();
  }
  for (int rank = 0; rank < config.ranks; rank++) {
    Arena& arena = arenas_.emplace_back(total);
    for (const Param& shape : shapes_) {
      addresses_.push_back(static_cast<uint8_t*>(arena.carve(param_bytes(shape, dtype_))));
    }
  }
}

void Store::populate(Pool& pool) {
  for (Arena& arena : arenas_) arena.populate(pool);
}

uint64_t Store::bytes() const {
  uint64_t sum = 0;
  for (const Arena& arena : arenas_) sum += arena.bytes();
  return sum;
}

void Store::read(int rank, int param, int64_t row, int64_t col, int64_t rows, int64_t cols, uint8_t* out) const {
  const size_t element = size_of(dtype_);
  const size_t pitch = static_cast<size_t>(shapes_[param].cols) * element;
  const size_t width = static_cast<size_t>(cols) * element;
  const uint8_t* from =
      addresses_[address_index(rank, param)] + static_cast<size_t>(row) * pitch + static_cast<size_t>(col) * element;
  for (int64_t r = 0; r < rows; r++) {
    if (width > 0) std::memcpy(out + static_cast<size_t>(r) * width, from + static_cast<size_t>(r) * pitch, width);
  }
}

}  // namespace refit
