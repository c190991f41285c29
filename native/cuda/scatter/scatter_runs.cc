#include "cuda/scatter/scatter_runs.h"

namespace refit::cuda {
namespace {

constexpr int64_t kElement = sizeof(Element);
// Joined runs end at the boundaries of the kernel's vectors.
constexpr uint64_t kVectorBytes = 16;

ByteRun run_of(const Copy2d& copy) {
  return {static_cast<const uint8_t*>(copy.src), reinterpret_cast<uint8_t*>(copy.dst), run_bytes(copy)};
}

}  // namespace

uint64_t run_bytes(const Copy2d& copy) {
  if (copy.dtype != kElementType || (copy.cols > 1 && copy.src_col_bytes != kElement)) return 0;
  if (copy.rows > 1 && (copy.src_row_bytes != copy.cols * kElement || copy.dst_cols != copy.cols)) return 0;
  return static_cast<uint64_t>(copy.rows * copy.cols * kElement);
}

Copy2d copy_of(const ByteRun& run) {
  Copy2d copy{};
  copy.src = run.src;
  copy.dst = reinterpret_cast<Element*>(run.dst);
  copy.rows = 1;
  copy.cols = copy.dst_cols = static_cast<int64_t>(run.bytes) / kElement;
  copy.src_col_bytes = kElement;
  copy.dtype = kElementType;
  return copy;
}

SplitCopies split_runs(const std::vector<Copy2d>& copies, uint64_t least) {
  SplitCopies out;
  for (size_t i = 0; i < copies.size();) {
    ByteRun run = run_of(copies[i]);
    if (run.bytes == 0) {
      out.rest.push_back(copies[i++]);
      continue;
    }
    const int memory = copies[i].memory;
    for (i++; i < copies.size() && copies[i].memory == memory; i++) {
      const ByteRun next = run_of(copies[i]);
      if (next.bytes == 0 || next.bytes % kVectorBytes != 0) break;
      if (next.src != run.src + run.bytes || next.dst != run.dst + run.bytes) break;
      run.bytes += next.bytes;
    }
    if (run.bytes >= least) {
      out.runs.push_back(run);
    } else {
      out.rest.push_back(copy_of(run));
    }
  }
  return out;
}

}  // namespace refit::cuda
