// The names of the fields, in order, of the packed rows that TypeScript writes into a Float64Array. src/native has the
// same lists (write-layout.ts, deltas.ts, groups.ts); `layouts` of the addon reports these, and a test compares them.
#pragma once
#include <array>
#include <cstddef>

#include "binding/napi_setup.h"

namespace refit::binding {

struct TensorRow {
  enum Field : size_t { kSource, kOffset, kDtype, kRows, kCols, kRowBytes, kColBytes };
  static constexpr std::array kNames{"source", "offset", "dtype", "rows", "cols", "rowBytes", "colBytes"};
};

struct RectRow {
  enum Field : size_t { kTensor, kRank, kParam, kSrcRow, kSrcCol, kRows, kCols, kDstRow, kDstCol };
  static constexpr std::array kNames{"tensor", "rank", "param", "srcRow", "srcCol", "rows", "cols", "dstRow", "dstCol"};
};

// A change of a tensor in a file: the tensor's position in the file and the change's position in the data.
struct DeltaRow {
  enum Field : size_t { kFd, kOffset, kBytes, kBegin, kEnd };
  static constexpr std::array kNames{"fd", "offset", "bytes", "begin", "end"};
};

// A range of bytes of a staging slot.
struct PartRow {
  enum Field : size_t { kOffset, kBytes };
  static constexpr std::array kNames{"offset", "bytes"};
};

// A message of a rank elsewhere to a rank of this process, and its range of bytes of a staging slot (into 0), or of
// parameter into - 1.
struct MessageRow {
  enum Field : size_t { kMine, kOther, kTag, kInto, kOffset, kBytes };
  static constexpr std::array kNames{"mine", "other", "tag", "into", "offset", "bytes"};
};

// All these names, the dtypes in order, and the numbers of states, memory tags, encodings of positions and rows of a
// step.
Napi::Object layouts(Napi::Env env);

}  // namespace refit::binding
