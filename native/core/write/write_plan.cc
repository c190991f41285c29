#include "core/write/write_plan.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace refit {
namespace {

class Planner {
 public:
  Planner(const WriteJob& job, const std::vector<Param>& params, const ChunkLimits& limits)
      : job_(job), params_(params), limits_(limits) {
    plan_.chunks_left.assign(job.tensors.size(), 0);
  }

  WritePlan run() {
    size_t from = 0;
    while (from < job_.rects.size()) {
      size_t to = from;
      while (to < job_.rects.size() && job_.rects[to].tensor == job_.rects[from].tensor) to++;
      plan_tensor(static_cast<int>(from), static_cast<int>(to));
      from = to;
    }
    return std::move(plan_);
  }

 private:
  // A range of rows or of columns.
  struct Span {
    int64_t from, count;
    int64_t end() const { return from + count; }
  };

  // The lines of a tensor are its rows or, if elements of a row are further apart than those of a column (a transposed
  // view), its columns. Adjacent elements then stay in one piece. `along` is the other axis.
  Span lines(const Rect& rect) const {
    return by_columns_ ? Span{rect.src_col, rect.cols} : Span{rect.src_row, rect.rows};
  }
  Span along(const Rect& rect) const {
    return by_columns_ ? Span{rect.src_row, rect.rows} : Span{rect.src_col, rect.cols};
  }

  // Cuts the lines wherever a rectangle begins or ends, so that within a piece the same rectangles need every line.
  void plan_tensor(int from, int to) {
    const Tensor& tensor = job_.tensors[job_.rects[from].tensor];
    by_columns_ = !tensor.rows_are_packed() && tensor.col_bytes > tensor.row_bytes;
    order_.clear();
    cuts_.clear();
    for (int i = from; i < to; i++) {
      const Rect& rect = job_.rects[i];
      if (rect.rows == 0 || rect.cols == 0) continue;
      order_.push_back(i);
      cuts_.push_back(lines(rect).from);
      cuts_.push_back(lines(rect).end());
    }
    std::stable_sort(order_.begin(), order_.end(),
                     [&](int a, int b) { return lines(job_.rects[a]).from < lines(job_.rects[b]).from; });
    std::sort(cuts_.begin(), cuts_.end());
    cuts_.erase(std::unique(cuts_.begin(), cuts_.end()), cuts_.end());
    live_.clear();
    size_t next = 0;
    for (size_t c = 0; c + 1 < cuts_.size(); c++) {
      const int64_t line = cuts_[c];
      std::erase_if(live_, [&](int i) { return lines(job_.rects[i]).end() <= line; });
      while (next < order_.size() && lines(job_.rects[order_[next]]).from == line) live_.push_back(order_[next++]);
      if (!live_.empty()) plan_lines(line, cuts_[c + 1] - line);
    }
  }

  // Cuts lines that the rectangles in live_ share into chunks.
  void plan_lines(int64_t line, int64_t count) {
    const Tensor& tensor = job_.tensors[job_.rects[live_[0]].tensor];
    int64_t from = std::numeric_limits<int64_t>::max();
    int64_t end = 0;
    for (const int i : live_) {
      from = std::min(from, along(job_.rects[i]).from);
      end = std::max(end, along(job_.rects[i]).end());
    }
    const uint64_t element = size_of(tensor.dtype);
    const uint64_t pitch = std::max<uint64_t>(by_columns_ ? tensor.col_bytes : tensor.row_bytes, 1);
    const uint64_t stride = std::max<uint64_t>(by_columns_                ? tensor.row_bytes
                                               : tensor.rows_are_packed() ? element
                                                                          : tensor.col_bytes,
                                               1);
    int64_t height = lines_within(limits_.straight, pitch, count);
    if (by_columns_ || straight_rect(height, from, end - from) < 0) {
      height = lines_within(limits_.staged, pitch, count);
    }
    // The last element has no gap after it, so a line of one element is never cut, even if columns are far apart.
    const uint64_t width = static_cast<uint64_t>(end - from - 1) * stride + element;
    const int64_t step = width > limits_.row ? lines_within(limits_.straight, stride, end - from) : end - from;
    for (int64_t l = line; l < line + count; l += height) {
      const int64_t n = std::min(height, line + count - l);
      for (int64_t a = from; a < end; a += step) {
        const int64_t m = std::min(step, end - a);
        if (by_columns_) {
          add(a, m, l, n);
        } else {
          add(l, n, a, m);
        }
      }
    }
  }

  static int64_t lines_within(uint64_t limit, uint64_t pitch, int64_t count) {
    return std::clamp<int64_t>(static_cast<int64_t>(limit / pitch), 1, count);
  }

  void add(int64_t row, int64_t rows, int64_t col, int64_t cols) {
    Chunk chunk;
    chunk.tensor = job_.rects[live_[0]].tensor;
    chunk.row = row;
    chunk.rows = rows;
    chunk.col = col;
    chunk.cols = cols;
    chunk.first_rect = plan_.rects.size();
    const int first = straight_rect(rows, col, cols);
    if (first >= 0) plan_.rects.push_back(first);
    for (const int i : live_) {
      if (i != first && meets(job_.rects[i], chunk)) plan_.rects.push_back(i);
    }
    chunk.rects = plan_.rects.size() - chunk.first_rect;
    if (chunk.rects == 0) return;  // columns between two rectangles
    chunk.straight = first >= 0;
    const Tensor& tensor = job_.tensors[chunk.tensor];
    if (!chunk.straight && job_.sources[tensor.source].fd >= 0) {
      plan_.scratch = std::max(plan_.scratch, chunk_span(chunk, tensor));
    }
    plan_.chunks.push_back(chunk);
    plan_.chunks_left[chunk.tensor]++;
  }

  // All rectangles of live_ need every line of a chunk, but a rectangle may need other elements of the lines.
  bool meets(const Rect& rect, const Chunk& chunk) const {
    const Span need = along(rect);
    const Span have = by_columns_ ? Span{chunk.row, chunk.rows} : Span{chunk.col, chunk.cols};
    return need.from < have.end() && have.from < need.end();
  }

  // A rectangle whose parameter can take this block of the file unchanged, or -1.
  int straight_rect(int64_t rows, int64_t col, int64_t cols) const {
    const Tensor& tensor = job_.tensors[job_.rects[live_[0]].tensor];
    if (job_.sources[tensor.source].fd < 0 || !tensor.rows_are_packed()) return -1;
    const bool packed = tensor.row_bytes == static_cast<uint64_t>(cols) * size_of(tensor.dtype);
    for (const int i : live_) {
      const Rect& rect = job_.rects[i];
      if (params_[rect.param].dtype != tensor.dtype) continue;
      if (rect.src_col > col || rect.src_col + rect.cols < col + cols) continue;
      if (rows == 1 || (packed && rect.cols == cols && params_[rect.param].cols == cols)) return i;
    }
    return -1;
  }

  const WriteJob& job_;
  const std::vector<Param>& params_;
  const ChunkLimits limits_;
  WritePlan plan_;
  bool by_columns_ = false;  // lines are columns
  std::vector<int> order_;   // rectangles of one tensor by first line
  std::vector<int> live_;    // rectangles that need the current lines
  std::vector<int64_t> cuts_;
};

}  // namespace

uint64_t chunk_span(const Chunk& chunk, const Tensor& tensor) {
  return tensor.at(chunk.row + chunk.rows - 1, chunk.col + chunk.cols - 1) - tensor.at(chunk.row, chunk.col) +
         size_of(tensor.dtype);
}

WritePlan plan_write(const WriteJob& job, const std::vector<Param>& params, const ChunkLimits& limits) {
  return Planner(job, params, limits).run();
}

}  // namespace refit
