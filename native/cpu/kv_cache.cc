#include "cpu/kv_cache.h"

#include <sys/mman.h>

#include <limits>
#include <new>
#include <stdexcept>

#include "core/arena.h"

namespace refit::cpu {
namespace {

template <class T, class Convert>
void write_token(uint8_t* page, uint64_t half_bytes, int page_size, int slot, int dim, const float* k, const float* v,
                 Convert convert) {
  T* kp = reinterpret_cast<T*>(page) + slot;
  for (int d = 0; d < dim; ++d) kp[static_cast<int64_t>(d) * page_size] = convert(k[d]);
  T* vp = reinterpret_cast<T*>(page + half_bytes) + static_cast<int64_t>(slot) * dim;
  for (int d = 0; d < dim; ++d) vp[d] = convert(v[d]);
}

}  // namespace

KvCache::KvCache(const KvShape& shape, DType dtype)
    : shape_(shape), dtype_(dtype == DType::kFloat16 ? DType::kFloat32 : dtype) {
  if (shape.pages <= 0 || shape.page_size <= 0)
    throw std::invalid_argument("bad configuration: pages and page_size must be positive");
  half_bytes_ = static_cast<uint64_t>(shape.page_size) * shape.head_dim * size_of(dtype_);
  unsigned __int128 total = static_cast<unsigned __int128>(half_bytes_) * 2 * shape.layers * shape.pages;
  total *= shape.kv_heads;
  if (total > std::numeric_limits<int64_t>::max())
    throw std::invalid_argument("bad configuration: the KV cache overflows the address space");
  rank_bytes_ = static_cast<uint64_t>(total);
  for (int rank = 0; rank < shape.ranks; ++rank) {
    void* p = mmap(nullptr, rank_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
      for (uint8_t* base : bases_) munmap(base, rank_bytes_);
      throw std::bad_alloc();
    }
    bases_.push_back(static_cast<uint8_t*>(p));
  }
}

KvCache::~KvCache() {
  for (uint8_t* base : bases_) munmap(base, rank_bytes_);
}

uint64_t KvCache::release() {
  uint64_t bytes = 0;
  for (uint8_t* base : bases_) bytes += drop_memory(base, rank_bytes_);
  return bytes;
}

void KvCache::write(int rank, int layer, int page, int slot, const float* k_row, const float* v_row) const {
  const int dim = shape_.head_dim;
  for (int head = 0; head < shape_.kv_heads; ++head) {
    uint8_t* at = k(rank, layer, page, head);
    const float* kh = k_row + static_cast<int64_t>(head) * dim;
    const float* vh = v_row + static_cast<int64_t>(head) * dim;
    if (dtype_ == DType::kBFloat16) {
      write_token<uint16_t>(at, half_bytes_, shape_.page_size, slot, dim, kh, vh, float_to_bf16);
    } else {
      write_token<float>(at, half_bytes_, shape_.page_size, slot, dim, kh, vh, [](float f) { return f; });
    }
  }
}

}  // namespace refit::cpu
