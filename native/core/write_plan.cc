#include "core/write_plan.h"

#include <algorithm>
#include <utility>

namespace refit {
namespace {

// Straight reads are long, to spare system calls. Staged ones stay in a core's second-level cache, so that the scatter
// reads from there and staging costs no memory bandwidth.
constexpr uint64_t kStraightBytes = 2 << 20;
constexpr uint64_t kStagedBytes = 256 << 10;
// A single row longer than this is cut by columns.
constexpr uint64_t kMaxRowBytes = 4 << 20;

class Planner {
 public:
  Planner(const WriteJob& job, const std::vector<Param>& params, DType dtype)
      : job_(job), params_(params), dtype_(dtype) {
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
  // Cuts the rows wherever a rectangle begins or ends, so that within a piece the same rectangles need every row.
  void plan_tensor(int from, int to) {
    order_.clear();
    cuts_.clear();
    for (int i = from; i < to; i++) {
      const Rect& rect = job_.rects[i];
      if (rect.rows == 0 || rect.cols == 0) continue;
      order_.push_back(i);
      cuts_.push_back(rect.src_row);
      cuts_.push_back(rect.src_row + rect.rows);
    }
    std::stable_sort(order_.begin(), order_.end(),
                     [&](int a, int b) { return job_.rects[a].src_row < job_.rects[b].src_row; });
    std::sort(cuts_.begin(), cuts_.end());
    cuts_.erase(std::unique(cuts_.begin(), cuts_.end()), cuts_.end());
    live_.clear();
    size_t next = 0;
    for (size_t c = 0; c + 1 < cuts_.size(); c++) {
      const int64_t row = cuts_[c];
      std::erase_if(live_, [&](int i) { return job_.rects[i].src_row + job_.rects[i].rows <= row; });
      while (next < order_.size() && job_.rects[order_[next]].src_row == row) live_.push_back(order_[next++]);
      if (!live_.empty()) plan_rows(row, cuts_[c + 1] - row);
    }
  }

  // Cuts rows that the rectangles in live_ share into chunks.
  void plan_rows(int64_t row, int64_t rows) {
    const Tensor& tensor = job_.tensors[job_.rects[live_[0]].tensor];
    int64_t col = tensor.cols;
    int64_t end = 0;
    for (const int i : live_) {
      col = std::min(col, job_.rects[i].src_col);
      end = std::max(end, job_.rects[i].src_col + job_.rects[i].cols);
    }
    const uint64_t pitch = std::max<uint64_t>(tensor.row_bytes, 1);
    int64_t height = std::clamp<int64_t>(kStraightBytes / pitch, 1, rows);
    if (straight_rect(height, col, end - col) < 0) height = std::clamp<int64_t>(kStagedBytes / pitch, 1, rows);
    const uint64_t width = static_cast<uint64_t>(end - col) * size_of(tensor.dtype);
    const int64_t step =
        width > kMaxRowBytes ? static_cast<int64_t>(kStraightBytes / size_of(tensor.dtype)) : end - col;
    for (int64_t r = row; r < row + rows; r += height) {
      const int64_t count = std::min(height, row + rows - r);
      for (int64_t c = col; c < end; c += step) add(r, count, c, std::min(step, end - c));
    }
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
      const Rect& rect = job_.rects[i];
      if (i != first && rect.src_col < col + cols && col < rect.src_col + rect.cols) plan_.rects.push_back(i);
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

  // A rectangle whose parameter can take this block of the file as it is, or -1.
  int straight_rect(int64_t rows, int64_t col, int64_t cols) const {
    const Tensor& tensor = job_.tensors[job_.rects[live_[0]].tensor];
    if (job_.sources[tensor.source].fd < 0 || tensor.dtype != dtype_) return -1;
    const bool packed = tensor.row_bytes == static_cast<uint64_t>(cols) * size_of(tensor.dtype);
    for (const int i : live_) {
      const Rect& rect = job_.rects[i];
      if (rect.src_col > col || rect.src_col + rect.cols < col + cols) continue;
      if (rows == 1 || (packed && rect.cols == cols && params_[rect.param].cols == cols)) return i;
    }
    return -1;
  }

  const WriteJob& job_;
  const std::vector<Param>& params_;
  const DType dtype_;
  WritePlan plan_;
  std::vector<int> order_;  // rectangles of one tensor by first row
  std::vector<int> live_;   // those that need the current rows
  std::vector<int64_t> cuts_;
};

}  // namespace

uint64_t chunk_span(const Chunk& chunk, const Tensor& tensor) {
  return static_cast<uint64_t>(chunk.rows - 1) * tensor.row_bytes +
         static_cast<uint64_t>(chunk.cols) * size_of(tensor.dtype);
}

WritePlan plan_write(const WriteJob& job, const std::vector<Param>& params, DType dtype) {
  return Planner(job, params, dtype).run();
}

}  // namespace refit
