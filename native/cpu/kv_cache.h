// The paged KV cache of all ranks, in the engine's dtype; float32 holds the values of float16.
#pragma once
#include <cstdint>
#include <vector>

#include "core/dtype.h"

namespace refit::cpu {

struct KvShape {
  int ranks, layers, pages, page_size, kv_heads, head_dim;  // kv_heads of one rank
};

// Per rank [layer][page][kv_head] { K [head_dim][page_size], V [page_size][head_dim] }. K is transposed, so the
// scores of adjacent tokens are adjacent in a vector. Memory is reserved, not committed: a page takes no memory before
// it is written.
//
// After a release the cache is empty and takes no memory until it is written again.
class KvCache {
 public:
  // Throws std::invalid_argument, std::bad_alloc.
  KvCache(const KvShape& shape, DType dtype);
  ~KvCache();
  KvCache(const KvCache&) = delete;
  KvCache& operator=(const KvCache&) = delete;

  // Gives the memory of all pages back to the system; addresses stay. Returns the number of bytes given back.
  uint64_t release();

  // Reserved bytes of all ranks.
  uint64_t bytes() const { return rank_bytes_ * bases_.size(); }
  DType dtype() const { return dtype_; }
  int page_size() const { return shape_.page_size; }
  int pages() const { return shape_.pages; }
  uint8_t* k(int rank, int layer, int page, int head) const {
    const uint64_t block = (static_cast<uint64_t>(layer) * shape_.pages + page) * shape_.kv_heads + head;
    return bases_[rank] + block * 2 * half_bytes_;
  }
  uint8_t* v(int rank, int layer, int page, int head) const { return k(rank, layer, page, head) + half_bytes_; }
  // Stores one token's K and V [kv_heads * head_dim] in its slot of a page. With 16 bits the values are already
  // rounded.
  void write(int rank, int layer, int page, int slot, const float* k_row, const float* v_row) const;

 private:
  KvShape shape_;
  DType dtype_;
  uint64_t half_bytes_;  // K (or V) of one page and head
  uint64_t rank_bytes_;
  std::vector<uint8_t*> bases_;
};

}  // namespace refit::cpu
