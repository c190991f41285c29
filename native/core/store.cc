#include "core/store.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/fault.h"

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

void copy_arena(const Arena& from, Arena& to, Pool& pool) {
  constexpr size_t kStretch = 4 << 20;
  const auto stretches = static_cast<int64_t>((from.bytes() + kStretch - 1) / kStretch);
  pool.parallel_for(stretches, [&](int64_t index, int) {
    const size_t at = static_cast<size_t>(index) * kStretch;
    std::memcpy(to.data() + at, from.data() + at, std::min(kStretch, from.bytes() - at));
  });
}

}  // namespace

Store::Store(const CoreConfig& config) : shapes_(config.params), ranks_(config.ranks), sets_(config.sets) {
  size_t weights = 0, adapters = 0;
  for (const Param& shape : shapes_) {
    size_t& total = is_weight(shape) ? weights : adapters;
    if (__builtin_add_overflow(total, Arena::padded(param_bytes(shape)), &total)) throw std::bad_alloc();
  }
  for (int rank = 0; rank < ranks_; rank++) adapters_.emplace_back(adapters);
  for (int set = 0; set < sets_; set++) {
    for (int rank = 0; rank < ranks_; rank++) {
      Arena& arena = weights_.emplace_back(weights);
      for (size_t p = 0; p < shapes_.size(); p++) {
        const bool is_shared = set > 0 && !is_weight(shapes_[p]);
        Arena& home = is_weight(shapes_[p]) ? arena : adapters_[rank];
        addresses_.push_back(is_shared ? address(rank, static_cast<int>(p), 0)
                                       : static_cast<uint8_t*>(home.carve(param_bytes(shapes_[p]))));
      }
    }
  }
}

std::vector<Arena*> Store::present() {
  std::vector<Arena*> out;
  for (int set = 0; set < sets_; set++) {
    for (int rank = 0; rank < ranks_ && !dropped_[set]; rank++) out.push_back(&weights_[set * ranks_ + rank]);
  }
  for (Arena& arena : adapters_) {
    if (arena.bytes() > 0) out.push_back(&arena);
  }
  return out;
}

void Store::populate(Pool& pool) {
  for (Arena* arena : present()) arena->populate(pool);
}

uint64_t Store::release(bool keep, Pool& pool) {
  if (released_) return 0;
  std::vector<Arena> copies;
  const std::vector<Arena*> arenas = present();
  if (keep) {
    for (const Arena* arena : arenas) copies.emplace_back(arena->bytes()).populate(pool);
    for (size_t i = 0; i < arenas.size(); i++) copy_arena(*arenas[i], copies[i], pool);
  }
  uint64_t bytes = 0;
  for (Arena* arena : arenas) bytes += arena->release();
  kept_ = std::move(copies);
  released_ = true;
  return bytes;
}

bool Store::resume(Pool& pool) {
  if (!released_) return true;
  const std::vector<Arena*> arenas = present();
  for (size_t i = 0; i < arenas.size(); i++) {
    try {
      arenas[i]->resume(pool);
    } catch (...) {
      for (size_t before = 0; before < i; before++) arenas[before]->release();
      throw;
    }
  }
  released_ = false;
  if (kept_.empty()) return false;
  for (size_t i = 0; i < arenas.size(); i++) copy_arena(kept_[i], *arenas[i], pool);
  kept_.clear();
  return true;
}

uint64_t Store::drop(int set) {
  uint64_t bytes = 0;
  for (int rank = 0; rank < ranks_ && !dropped_[set]; rank++) bytes += weights_[set * ranks_ + rank].release();
  dropped_[set] = true;
  return bytes;
}

void Store::restore(int set, Pool& pool) {
  if (!dropped_[set]) return;
  for (int rank = 0; rank < ranks_; rank++) {
    try {
      weights_[set * ranks_ + rank].resume(pool);
    } catch (...) {
      for (int before = 0; before < rank; before++) weights_[set * ranks_ + before].release();
      throw;
    }
  }
  dropped_[set] = false;
}

uint64_t Store::set_bytes() const { return weights_.front().bytes() * static_cast<uint64_t>(ranks_); }

uint64_t Store::bytes() const { return set_bytes() + adapters_.front().bytes() * static_cast<uint64_t>(ranks_); }

void Store::copy(const std::vector<Rect>& rects, int from, int to, Pool& pool) {
  pool.parallel_for(static_cast<int64_t>(rects.size()), [&](int64_t index, int) {
    const Rect& rect = rects[index];
    if (REFIT_FAULT(kCopy)) throw std::runtime_error("injected fault: copy");
    const size_t element = size_of(shapes_[rect.param].dtype);
    const size_t pitch = static_cast<size_t>(shapes_[rect.param].cols) * element;
    const size_t width = static_cast<size_t>(rect.cols) * element;
    const size_t at = static_cast<size_t>(rect.dst_row) * pitch + static_cast<size_t>(rect.dst_col) * element;
    const uint8_t* source = address(rect.rank, rect.param, from) + at;
    uint8_t* target = address(rect.rank, rect.param, to) + at;
    if (width == pitch) {
      std::memcpy(target, source, static_cast<size_t>(rect.rows) * pitch);
      return;
    }
    for (int64_t r = 0; r < rect.rows; r++, source += pitch, target += pitch) std::memcpy(target, source, width);
  });
}

void Store::read(int rank, int param, int64_t row, int64_t col, int64_t rows, int64_t cols, uint8_t* out,
                 int set) const {
  const size_t element = size_of(shapes_[param].dtype);
  const size_t pitch = static_cast<size_t>(shapes_[param].cols) * element;
  const size_t width = static_cast<size_t>(cols) * element;
  const uint8_t* from =
      address(rank, param, set) + static_cast<size_t>(row) * pitch + static_cast<size_t>(col) * element;
  for (int64_t r = 0; r < rows; r++) {
    if (width > 0) std::memcpy(out + static_cast<size_t>(r) * width, from + static_cast<size_t>(r) * pitch, width);
  }
}

}  // namespace refit
