// Cuts a list of strided copies into tiles: plain host arithmetic, without a GPU.
//
// A row of a copy is cut into slots: the aligned 16-byte units (8 elements) of the target that it touches. A tile is
// some rows times some slots; a block of the kernel takes one tile at a time.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/philox.h"
#include "cuda/scatter/scatter.h"

namespace refit::cuda {

enum class ScatterPath : uint8_t {
  kVector,     // Elements whose source and target rows begin and end at multiples of 16 bytes: no checks per element
  kRows,       // adjacent source elements; any alignment, any dtype
  kGather,     // source elements with gaps; rows are at least as far apart as columns
  kTranspose,  // rows of the source are closer together than columns: through shared memory
};

// A copy as a block reads it; the GPU uses this layout.
struct alignas(16) ScatterCopy {
  uint64_t src, dst;         // addresses of element (0, 0)
  int64_t src_row, src_col;  // bytes
  uint64_t cols;
  uint32_t dst_row;  // bytes
  uint32_t rows;
  uint32_t slots;  // maximum per row; a row that begins at another offset in its first slot may touch one less
  uint32_t tile_rows, tile_slots;
  ScatterPath path;
  DType dtype;
  uint16_t tag;  // free for the caller
};
static_assert(sizeof(ScatterCopy) == 64);

// Rows [row, row + rows) x slots [slot, slot + slots) of a copy.
struct TileRange {
  uint32_t row, rows, slot, slots;
};
// Tile `index` of the copy's own tiles.
REFIT_HOST_DEVICE inline TileRange tile_range(const ScatterCopy& copy, uint32_t index) {
  const uint32_t wide = (copy.slots + copy.tile_slots - 1) / copy.tile_slots;
  TileRange range;
  range.row = index / wide * copy.tile_rows;
  range.slot = index % wide * copy.tile_slots;
  range.rows = copy.rows - range.row < copy.tile_rows ? copy.rows - range.row : copy.tile_rows;
  range.slots = copy.slots - range.slot < copy.tile_slots ? copy.slots - range.slot : copy.tile_slots;
  return range;
}

// Elements [from, to) of the row at `dst` are in the slot, which would begin at element `first` (may be negative).
// Empty if the row ends before it.
struct SlotRange {
  int64_t first, from, to;
};
REFIT_HOST_DEVICE inline SlotRange slot_range(uint64_t dst, uint64_t cols, uint32_t slot) {
  const int64_t first = static_cast<int64_t>(slot) * 8 - static_cast<int64_t>(dst % 16 / 2);
  const auto end = static_cast<int64_t>(cols);
  return {first, first < 0 ? 0 : first, first + 8 < end ? first + 8 : end};
}

// Size of a tile that passes through shared memory: slots and rows.
constexpr uint32_t kTransposeSlots = 8, kTransposeRows = 64;
// Shorter rows are not worth a bulk copy each.
constexpr uint64_t kMinBulkRow = 512;
// Maximum bytes of a tile that is copied in bulk.
constexpr uint32_t kBulkBytes = 24 << 10;

// Copies and their tiles, in arrays with room for `capacity` entries (first_tile: one more).
struct ScatterList {
  uint32_t* first_tile = nullptr;  // of each copy, rising; [count] is the sum
  ScatterCopy* copies = nullptr;
  uint32_t capacity = 0;
  uint32_t count = 0;
  uint32_t tiles = 0;
};

struct ScatterLists {
  ScatterList threads;  // for ordinary loads and stores
  ScatterList bulk;     // for bulk copies through shared memory; only kVector
};

// Adds the tiles of one copy; false, and nothing added, if there is no room. `tile_bytes`: approximate target bytes of
// a tile. `bulk`: put copies into the bulk list where possible, else all into the other list.
bool plan_copy(const Copy2d& copy, uint32_t tile_bytes, bool bulk, ScatterLists& out);
// Adds copies[from], copies[from + 1], ... while there is room. Returns the next index.
size_t plan_scatter(const std::vector<Copy2d>& copies, size_t from, uint32_t tile_bytes, bool bulk, ScatterLists& out);

}  // namespace refit::cuda
