// Bounds of a write, a checksum and a read, checked in full before anything is touched. All throw std::invalid_argument
// with a message that names the tensor or rectangle at fault; none changes anything.
#pragma once
#include <cstdint>
#include <vector>

#include "core/model.h"
#include "core/write/write.h"

namespace refit {

// Every tensor lies inside its source (files are bounded by their own end when they are read, segments by theirs when
// they are open), every rectangle lies inside its tensor and its parameter, rectangles are sorted by tensor, and no two
// of them overlap in a parameter, because the result would depend on the order of threads.
void check_write(const WriteJob& job, int ranks, const std::vector<Param>& params);

// tensor_cols[rect.tensor] bounds the columns; rows are bounded only by indices of 63 bits.
void check_checksum(const std::vector<Rect>& rects, const std::vector<int64_t>& tensor_cols, int ranks,
                    const std::vector<Param>& params);

void check_read(int rank, int param, int64_t row, int64_t col, int64_t rows, int64_t cols, int ranks,
                const std::vector<Param>& params);

}  // namespace refit
