#include "cuda/scatter/scatter_plan.h"

#include <algorithm>
#include <limits>

namespace refit::cuda {
namespace {

constexpr uint64_t kSlotBytes = 16;
constexpr int64_t kSlotElements = 8;
// Larger copies are split, so that slots, rows and tiles of a copy fit 32 bits.
constexpr int64_t kMaxCols = int64_t{1} << 33;
constexpr int64_t kMaxRows = int64_t{1} << 30;
constexpr int64_t kMaxPitch = (int64_t{1} << 31) - 1;

// The same elements with fewer, longer rows, if possible.
Copy2d simplified(Copy2d copy) {
  const auto element = static_cast<int64_t>(size_of(copy.dtype));
  if (copy.cols == 1) copy.src_col_bytes = element;
  if (copy.rows > 1 && copy.src_col_bytes == element && copy.src_row_bytes == copy.cols * element &&
      copy.dst_cols == copy.cols) {
    copy.cols *= copy.rows;
    copy.rows = 1;
  } else if (copy.cols == 1 && copy.dst_cols == 1) {
    // A strided vector: treat it as one row.
    copy.src_col_bytes = copy.src_row_bytes;
    copy.cols = copy.rows;
    copy.rows = 1;
  }
  if (copy.rows == 1) copy.src_row_bytes = 0;
  return copy;
}

bool aligned(int64_t value) { return value % static_cast<int64_t>(kSlotBytes) == 0; }

ScatterPath path_of(const Copy2d& copy) {
  if (copy.src_col_bytes != static_cast<int64_t>(size_of(copy.dtype))) {
    return copy.rows > 1 && copy.src_row_bytes < copy.src_col_bytes ? ScatterPath::kTranspose : ScatterPath::kGather;
  }
  const bool whole_slots = reinterpret_cast<uintptr_t>(copy.dst) % kSlotBytes == 0 && copy.cols % kSlotElements == 0 &&
                           (copy.rows == 1 || copy.dst_cols % kSlotElements == 0);
  const bool same = copy.dtype == kElementType && reinterpret_cast<uintptr_t>(copy.src) % kSlotBytes == 0 &&
                    (copy.rows == 1 || aligned(copy.src_row_bytes));
  return whole_slots && same ? ScatterPath::kVector : ScatterPath::kRows;
}

// Maximum number of slots that a row touches.
uint64_t slots_of(const Copy2d& copy) {
  uint64_t before = reinterpret_cast<uintptr_t>(copy.dst) % kSlotBytes;
  if (copy.rows > 1 && copy.dst_cols % kSlotElements != 0) before = kSlotBytes - sizeof(Element);
  return (before + static_cast<uint64_t>(copy.cols) * sizeof(Element) + kSlotBytes - 1) / kSlotBytes;
}

uint64_t divided_up(uint64_t value, uint64_t by) { return (value + by - 1) / by; }

// Adds one copy whose numbers fit; false if there is no room.
bool add(const Copy2d& copy, uint32_t tile_bytes, bool may_bulk, ScatterLists& out) {
  const ScatterPath path = path_of(copy);
  const bool bulk = path == ScatterPath::kVector && may_bulk &&
                    (copy.rows == 1 || static_cast<uint64_t>(copy.cols) * sizeof(Element) >= kMinBulkRow);
  ScatterList& list = bulk ? out.bulk : out.threads;
  ScatterCopy entry = {};
  entry.src = reinterpret_cast<uintptr_t>(copy.src);
  entry.dst = reinterpret_cast<uintptr_t>(copy.dst);
  entry.src_row = copy.src_row_bytes;
  entry.src_col = copy.src_col_bytes;
  entry.cols = static_cast<uint64_t>(copy.cols);
  entry.rows = static_cast<uint32_t>(copy.rows);
  entry.dst_row = copy.rows == 1 ? 0 : static_cast<uint32_t>(copy.dst_cols * static_cast<int64_t>(sizeof(Element)));
  entry.path = path;
  entry.dtype = copy.dtype;
  uint64_t rows = 1;
  uint64_t slots = 0;
  if (path == ScatterPath::kTranspose) {
    // Groups of 8 columns, counted from the first one, at any place in the target.
    slots = divided_up(entry.cols, kSlotElements);
    entry.tile_slots = kTransposeSlots;
    rows = kTransposeRows;
  } else {
    slots = slots_of(copy);
    const uint64_t most = (bulk ? kBulkBytes : tile_bytes) / kSlotBytes;
    // Equal parts, aligned to 128 bytes of the target.
    const uint64_t equal = divided_up(slots, divided_up(slots, most));
    entry.tile_slots = static_cast<uint32_t>(std::min(most, divided_up(equal, 8) * 8));
    if (slots <= most) {
      entry.tile_slots = static_cast<uint32_t>(slots);
      rows = most / slots;
    }
  }
  entry.tile_rows = static_cast<uint32_t>(std::min<uint64_t>(rows, entry.rows));
  entry.slots = static_cast<uint32_t>(slots);
  const uint64_t tiles = divided_up(entry.rows, entry.tile_rows) * divided_up(slots, entry.tile_slots);
  // Each block takes the kernel's counter one step past the end.
  if (list.count == list.capacity || list.tiles + tiles > std::numeric_limits<int32_t>::max()) return false;
  list.copies[list.count] = entry;
  list.first_tile[list.count++] = list.tiles;
  list.tiles += static_cast<uint32_t>(tiles);
  list.first_tile[list.count] = list.tiles;
  return true;
}

}  // namespace

bool plan_copy(const Copy2d& asked, uint32_t tile_bytes, bool bulk, ScatterLists& out) {
  if (asked.rows <= 0 || asked.cols <= 0) return true;
  const Copy2d copy = simplified(asked);
  const int64_t height = copy.dst_cols > kMaxPitch ? 1 : kMaxRows;
  if (copy.rows <= height && copy.cols <= kMaxCols) return add(copy, tile_bytes, bulk, out);
  // Very large copies are split; either all parts go into this list or none.
  const ScatterLists before = out;
  for (int64_t r = 0; r < copy.rows; r += height) {
    for (int64_t c = 0; c < copy.cols; c += kMaxCols) {
      Copy2d piece = copy;
      piece.rows = std::min(height, copy.rows - r);
      piece.cols = std::min(kMaxCols, copy.cols - c);
      piece.src = static_cast<const uint8_t*>(copy.src) + r * copy.src_row_bytes + c * copy.src_col_bytes;
      piece.dst = copy.dst + r * copy.dst_cols + c;
      if (piece.rows == 1) piece.src_row_bytes = 0;
      if (!add(piece, tile_bytes, bulk, out)) {
        out = before;
        return false;
      }
    }
  }
  return true;
}

size_t plan_scatter(const std::vector<Copy2d>& copies, size_t from, uint32_t tile_bytes, bool bulk, ScatterLists& out) {
  size_t next = from;
  while (next < copies.size() && plan_copy(copies[next], tile_bytes, bulk, out)) next++;
  return next;
}

}  // namespace refit::cuda
