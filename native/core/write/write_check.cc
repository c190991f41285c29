#include "core/write/write_check.h"

#include <algorithm>
#include <limits>
#include <map>
#include <queue>
#include <stdexcept>
#include <string>
#include <tuple>

namespace refit {
namespace {

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

// True if [from, from + count) is inside [0, size), without overflow for any numbers.
bool inside(int64_t from, int64_t count, int64_t size) {
  return from >= 0 && count >= 0 && from <= size && count <= size - from;
}

std::string span(int64_t from, int64_t count) { return std::to_string(from) + " + " + std::to_string(count); }

std::string shape(int64_t rows, int64_t cols) { return "[" + std::to_string(rows) + ", " + std::to_string(cols) + "]"; }

std::string rect_name(size_t index, const Rect& rect) {
  return "rectangle " + std::to_string(index) + " (tensor " + std::to_string(rect.tensor) + ")";
}

// `who` returns the name for the message. It is called only for a refusal, because a job has tens of thousands of
// rectangles.
template <typename Who>
void check_target(Who who, int rank, int param, int64_t row, int64_t col, int64_t rows, int64_t cols, int ranks,
                  const std::vector<Param>& params) {
  if (rank < 0 || rank >= ranks) {
    refuse(who() + ": rank " + std::to_string(rank) + " does not exist, there are " + std::to_string(ranks));
  }
  if (param < 0 || static_cast<size_t>(param) >= params.size()) {
    refuse(who() + ": parameter " + std::to_string(param) + " does not exist, there are " +
           std::to_string(params.size()));
  }
  const Param& p = params[param];
  if (!inside(row, rows, p.rows)) {
    refuse(who() + ": rows " + span(row, rows) + " exceed parameter " + p.name + " " + shape(p.rows, p.cols));
  }
  if (!inside(col, cols, p.cols)) {
    refuse(who() + ": columns " + span(col, cols) + " exceed parameter " + p.name + " " + shape(p.rows, p.cols));
  }
}

void check_segment(size_t index, const Segment& segment) {
  const std::string who = "segment " + std::to_string(index);
  const auto whole = [&](const char* what, size_t bytes) {
    if (bytes % Segment::kHandleBytes == 0) return;
    refuse(who + ": " + what + " have " + std::to_string(bytes) + " bytes, expected 64 for each");
  };
  whole("event handles", segment.events.size());
  const size_t kinds =
      (segment.handle.empty() ? 0 : 1) + (segment.fds.empty() ? 0 : 1) + (segment.fabric.empty() ? 0 : 1);
  if (kinds != 1) refuse(who + ": expected a handle, descriptors of blocks, or fabric handles of blocks");
  if (!segment.handle.empty()) {
    if (segment.handle.size() == Segment::kHandleBytes) return;
    refuse(who + ": the handle has " + std::to_string(segment.handle.size()) + " bytes, expected 64");
  }
  whole("fabric handles", segment.fabric.size());
  uint64_t bytes = 0;
  if (segment.block_bytes == 0 || __builtin_mul_overflow(segment.block_bytes, segment.blocks(), &bytes) ||
      bytes > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    refuse(who + ": " + std::to_string(segment.blocks()) + " blocks of " + std::to_string(segment.block_bytes) +
           " bytes each");
  }
}

void check_tensor(size_t index, const Tensor& tensor, const std::vector<Source>& sources) {
  const auto who = [&] { return "tensor " + std::to_string(index); };
  if (tensor.source < 0 || static_cast<size_t>(tensor.source) >= sources.size()) {
    refuse(who() + ": source " + std::to_string(tensor.source) + " does not exist, there are " +
           std::to_string(sources.size()));
  }
  if (tensor.rows < 0 || tensor.cols < 0) refuse(who() + ": negative shape " + shape(tensor.rows, tensor.cols));
  if (tensor.rows == 0 || tensor.cols == 0) return;
  const uint64_t element = size_of(tensor.dtype);
  uint64_t last_col = 0;
  uint64_t last_row = 0;
  uint64_t end = 0;
  if (__builtin_mul_overflow(static_cast<uint64_t>(tensor.cols - 1), tensor.col_bytes, &last_col) ||
      __builtin_mul_overflow(static_cast<uint64_t>(tensor.rows - 1), tensor.row_bytes, &last_row) ||
      __builtin_add_overflow(tensor.offset, last_row, &end) || __builtin_add_overflow(end, last_col, &end) ||
      __builtin_add_overflow(end, element, &end) || end > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    refuse(who() + ": shape " + shape(tensor.rows, tensor.cols) + " at byte " + std::to_string(tensor.offset) +
           " does not fit 63 bits");
  }
  // A view may have any strides as long as it lies inside the source. Packed rows that overlap are a mistake.
  if (tensor.rows > 1 && tensor.rows_are_packed() && tensor.row_bytes < last_col + element) {
    refuse(who() + ": " + std::to_string(tensor.row_bytes) + " bytes from row to row, but a row has " +
           std::to_string(last_col + element));
  }
  const Source& source = sources[tensor.source];
  if (source.fd < 0 && source.segment < 0 && end > source.bytes) {
    refuse(who() + ": ends at byte " + std::to_string(end) + ", but source " + std::to_string(tensor.source) + " has " +
           std::to_string(source.bytes));
  }
}

using Ids = std::vector<size_t>;

// Sweeps one parameter from its first row to its last; `live` holds the rectangles of the current row by column. The
// ids are sorted by their first rows.
void check_overlap(const std::vector<Rect>& rects, Ids::const_iterator first, Ids::const_iterator last,
                   const Param& param) {
  std::map<int64_t, size_t> live;
  using End = std::pair<int64_t, int64_t>;  // row after the last, column
  std::priority_queue<End, std::vector<End>, std::greater<End>> ends;
  for (auto it = first; it != last; ++it) {
    const size_t id = *it;
    const Rect& rect = rects[id];
    while (!ends.empty() && ends.top().first <= rect.dst_row) {
      live.erase(ends.top().second);
      ends.pop();
    }
    const auto after = live.lower_bound(rect.dst_col);
    const Rect* other = nullptr;
    if (after != live.end() && after->first < rect.dst_col + rect.cols) other = &rects[after->second];
    if (other == nullptr && after != live.begin()) {
      const Rect& before = rects[std::prev(after)->second];
      if (before.dst_col + before.cols > rect.dst_col) other = &before;
    }
    if (other != nullptr) {
      refuse(rect_name(id, rect) + ": overlaps " + rect_name(other - rects.data(), *other) + " in parameter " +
             param.name + " of rank " + std::to_string(rect.rank));
    }
    live.emplace(rect.dst_col, id);
    ends.emplace(rect.dst_row + rect.rows, rect.dst_col);
  }
}

void check_overlaps(const std::vector<Rect>& rects, const std::vector<Param>& params) {
  Ids ids;
  ids.reserve(rects.size());
  for (size_t i = 0; i < rects.size(); i++) {
    if (rects[i].rows > 0 && rects[i].cols > 0) ids.push_back(i);
  }
  std::sort(ids.begin(), ids.end(), [&](size_t a, size_t b) {
    const Rect &x = rects[a], &y = rects[b];
    return std::tie(x.rank, x.param, x.dst_row) < std::tie(y.rank, y.param, y.dst_row);
  });
  for (auto first = ids.cbegin(); first != ids.cend();) {
    const Rect& rect = rects[*first];
    const auto last = std::find_if(
        first, ids.cend(), [&](size_t id) { return rects[id].rank != rect.rank || rects[id].param != rect.param; });
    if (last - first > 1) check_overlap(rects, first, last, params[static_cast<size_t>(rect.param)]);
    first = last;
  }
}

}  // namespace

void check_write(const WriteJob& job, int ranks, const std::vector<Param>& params) {
  for (size_t i = 0; i < job.segments.size(); i++) check_segment(i, job.segments[i]);
  for (size_t i = 0; i < job.sources.size(); i++) {
    const size_t staged = job.sources[i].rank_data.size();
    if (staged != 0 && staged != static_cast<size_t>(ranks)) {
      refuse("source " + std::to_string(i) + ": is staged on the GPUs of " + std::to_string(staged) +
             " ranks, expected " + std::to_string(ranks) + ": its group is of another engine");
    }
    if (job.sources[i].segment < static_cast<int>(job.segments.size())) continue;
    refuse("source " + std::to_string(i) + ": segment " + std::to_string(job.sources[i].segment) +
           " does not exist, there are " + std::to_string(job.segments.size()));
  }
  for (size_t i = 0; i < job.tensors.size(); i++) check_tensor(i, job.tensors[i], job.sources);
  for (size_t i = 0; i < job.rects.size(); i++) {
    const Rect& rect = job.rects[i];
    if (rect.tensor < 0 || static_cast<size_t>(rect.tensor) >= job.tensors.size()) {
      refuse(rect_name(i, rect) + ": the tensor does not exist, there are " + std::to_string(job.tensors.size()));
    }
    if (i > 0 && rect.tensor < job.rects[i - 1].tensor) {
      refuse(rect_name(i, rect) + ": comes after tensor " + std::to_string(job.rects[i - 1].tensor) +
             "; rectangles must be sorted by tensor");
    }
    const Tensor& tensor = job.tensors[rect.tensor];
    if (!inside(rect.src_row, rect.rows, tensor.rows)) {
      refuse(rect_name(i, rect) + ": rows " + span(rect.src_row, rect.rows) + " exceed its shape " +
             shape(tensor.rows, tensor.cols));
    }
    if (!inside(rect.src_col, rect.cols, tensor.cols)) {
      refuse(rect_name(i, rect) + ": columns " + span(rect.src_col, rect.cols) + " exceed its shape " +
             shape(tensor.rows, tensor.cols));
    }
    check_target([&] { return rect_name(i, rect); }, rect.rank, rect.param, rect.dst_row, rect.dst_col, rect.rows,
                 rect.cols, ranks, params);
  }
  check_overlaps(job.rects, params);
}

void check_checksum(const std::vector<Rect>& rects, const std::vector<int64_t>& tensor_cols, int ranks,
                    const std::vector<Param>& params) {
  for (size_t i = 0; i < rects.size(); i++) {
    const Rect& rect = rects[i];
    if (rect.tensor < 0 || static_cast<size_t>(rect.tensor) >= tensor_cols.size()) {
      refuse(rect_name(i, rect) + ": tensorCols has " + std::to_string(tensor_cols.size()) + " entries");
    }
    const int64_t cols = tensor_cols[rect.tensor];
    if (!inside(rect.src_col, rect.cols, cols)) {
      refuse(rect_name(i, rect) + ": columns " + span(rect.src_col, rect.cols) + " exceed the tensor's " +
             std::to_string(cols));
    }
    int64_t end = 0;
    if (rect.src_row < 0 || rect.rows < 0 || __builtin_add_overflow(rect.src_row, rect.rows, &end) ||
        __builtin_mul_overflow(end, cols, &end)) {
      refuse(rect_name(i, rect) + ": rows " + span(rect.src_row, rect.rows) + " do not fit 63 bits");
    }
    check_target([&] { return rect_name(i, rect); }, rect.rank, rect.param, rect.dst_row, rect.dst_col, rect.rows,
                 rect.cols, ranks, params);
  }
}

void check_read(int rank, int param, int64_t row, int64_t col, int64_t rows, int64_t cols, int ranks,
                const std::vector<Param>& params) {
  check_target([] { return std::string("read"); }, rank, param, row, col, rows, cols, ranks, params);
}

}  // namespace refit
