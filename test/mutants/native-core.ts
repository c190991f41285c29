import type { Mutant } from './mutant.ts'

export const nativeCore: readonly Mutant[] = [
  {
    why: 'the thread runs a step while the one before it runs on the thread of its collector',
    file: 'native/core/step_queue.cc',
    before: 'return !running_ && (closing_',
    after: 'return (closing_',
    tests: ['native/test/steps/step_queue_test.cc']
  },
  {
    why: 'settle leaves the step that waits for its collector',
    file: 'native/core/step_queue.cc',
    before: 'if (!waiting_.empty()) hand_over();',
    after: '',
    tests: ['native/test/steps/step_queue_test.cc']
  },
  {
    why: 'a step takes the token of another row of the step before',
    file: 'native/core/step_queue.cc',
    before: 'token = before[static_cast<size_t>(fed_row(token))];',
    after: 'token = before[before.size() - 1 - static_cast<size_t>(fed_row(token))];',
    tests: ['native/test/steps/step_queue_test.cc']
  },
  {
    why: 'tokens of a failed step are those of the one before it',
    file: 'native/core/step_queue.cc',
    before: 'step->feed(std::exchange(tokens_, {}));',
    after: 'step->feed(tokens_);',
    tests: ['native/test/steps/step_queue_test.cc']
  },
  {
    why: 'a checksum skips the last rows of a large parameter',
    file: 'native/core/checksum.cc',
    before: 'for (int64_t r = 0; r < rects[i].rows; r += height) tasks',
    after: 'for (int64_t r = 0; r == 0 || r + height <= rects[i].rows; r += height) tasks',
    tests: ['native/test/checksum_test.cc']
  },
  {
    why: 'a checksum of a column slice reads rows of the wrong stride',
    file: 'native/core/checksum.cc',
    before: 'checksum_run(data + row * dst_cols * size_of(dtype), dtype, first',
    after: 'checksum_run(data + row * src_cols * size_of(dtype), dtype, first',
    tests: ['native/test/checksum_test.cc']
  },
  {
    why: 'a checksum counts from the first column of the tensor',
    file: 'native/core/checksum.cc',
    before: 'static_cast<uint64_t>(rect.src_row + task.row) * src_cols + rect.src_col;',
    after: 'static_cast<uint64_t>(rect.src_row + task.row) * src_cols;',
    tests: ['native/test/checksum_test.cc']
  },
  {
    why: 'a checksum leaves out the elements after the last whole group',
    file: 'native/core/checksum.cc',
    before: 'sum_few(data + whole, first + static_cast<uint64_t>(whole), n - whole);',
    after: 'sum_few(data + whole, first + static_cast<uint64_t>(whole), 0);',
    tests: ['native/test/checksum_test.cc']
  },
  {
    why: 'a read that breaks off inside a parameter counts as untouched',
    file: 'native/core/write/write.cc',
    before: 'if (straight && result.touched) dirty_',
    after: 'if (straight && result.ok(wanted)) dirty_',
    tests: ['native/test/write_test.cc']
  },
  {
    why: 'bits of another dtype are applied as a change of bits',
    file: 'native/core/write/element_patch.cc',
    before: 'if (patch.is_xor && patch.dtype != dtype) {',
    after: 'if (patch.is_xor && size_of(patch.dtype) != size_of(dtype)) {',
    tests: ['native/test/element_patch_test.cc']
  },
  {
    why: 'a position that comes twice in a delta is accepted',
    file: 'native/core/write/element_patch.cc',
    before: 'if (twice) throw',
    after: 'if (twice && outside) throw',
    tests: ['native/test/element_patch_test.cc']
  },
  {
    why: 'the last element of a tensor is refused as outside',
    file: 'native/core/write/element_patch.cc',
    before: 'outside = position >= elements;',
    after: 'outside = position + 1 >= elements;',
    tests: ['native/test/element_patch_test.cc']
  },
  {
    why: 'gaps of a delta count from the position before, not after it',
    file: 'native/core/write/element_patch.cc',
    before: 'position += uint64_t{load<decltype(type)>(patch.positions, i)} + 1;',
    after: 'position += uint64_t{load<decltype(type)>(patch.positions, i)} + (i > 0 ? 0 : 1);',
    tests: ['native/test/element_patch_test.cc']
  },
  {
    why: 'a copy that fails leaves no mark that bytes have changed',
    file: 'native/core/write/write.cc',
    before: `      dirty_[chunk.tensor].store(true, std::memory_order_relaxed);
      scatter`,
    after: '      scatter',
    tests: ['native/test/write_test.cc']
  },
  {
    why: 'a straight read is copied to its first rank only',
    file: 'native/core/write/write.cc',
    before: 'for (size_t i = chunk.straight ? 1 : 0; i < chunk.rects; i++) {',
    after: 'for (size_t i = 0; i < (chunk.straight ? 0 : chunk.rects); i++) {',
    tests: ['native/test/write_test.cc']
  },
  {
    why: 'the error of a write names no tensor',
    file: 'native/core/write/write.cc',
    before: `      error_tensor_ = tensor;
`,
    after: '',
    tests: ['native/test/write_test.cc']
  },
  {
    why: 'a packed block into a wider parameter is written as one run',
    file: 'native/core/write/write.cc',
    before: 'size_of(from) && store_.shape(rect.param).cols == cols) {',
    after: 'size_of(from)) {',
    tests: ['native/test/write_test.cc']
  },
  {
    why: 'rectangles of a chunk of columns are taken from the left one only',
    file: 'native/core/write/write_plan.cc',
    before: 'return need.from < have.end() && have.from < need.end();',
    after: 'return need.from <= have.from && have.from < need.end();',
    tests: ['native/test/write_test.cc']
  },
  {
    why: 'the last rows of a tensor are cut off a plan',
    file: 'native/core/write/write_plan.cc',
    before: 'const int64_t n = std::min(height, line + count - l);',
    after: 'const int64_t n = std::min(height, line + count - l - 1);',
    tests: ['native/test/write_test.cc']
  },
  {
    why: 'a row range is read straight into a parameter of another dtype',
    file: 'native/core/write/write_plan.cc',
    before: 'if (params_[rect.param].dtype != tensor.dtype) continue;',
    after: 'if (size_of(params_[rect.param].dtype) != size_of(tensor.dtype)) continue;',
    tests: ['native/test/write_test.cc']
  },
  {
    why: 'rectangles that overlap by a row are accepted',
    file: 'native/core/write/write_check.cc',
    before: 'while (!ends.empty() && ends.top().first <= rect.dst_row) {',
    after: 'while (!ends.empty() && ends.top().first <= rect.dst_row + 1) {',
    tests: ['native/test/store_test.cc']
  },
  {
    why: 'a tensor may end one element behind its source',
    file: 'native/core/write/write_check.cc',
    before: '__builtin_add_overflow(end, element, &end) ||',
    after: '__builtin_add_overflow(end, uint64_t{0}, &end) ||',
    tests: ['test/native/write.test.ts']
  },
  {
    why: 'columns outside of a tensor are accepted',
    file: 'native/core/write/write_check.cc',
    before: `    if (!inside(rect.src_col, rect.cols, tensor.cols)) {
      refuse(rect_name(i, rect) + ": columns " + span(rect.src_col, rect.cols) + " exceed its shape " +`,
    after: `    if (!inside(rect.src_col, rect.cols, tensor.cols + 1)) {
      refuse(rect_name(i, rect) + ": columns " + span(rect.src_col, rect.cols) + " exceed its shape " +`,
    tests: ['test/native/write.test.ts']
  },
  {
    why: 'a strided block after the first is read from the start',
    file: 'native/core/write/write_convert.cc',
    before: 'const uint8_t* at = src + static_cast<uint64_t>(i) * stride;',
    after: 'const uint8_t* at = src + static_cast<uint64_t>(i) * size_of(from);',
    tests: ['native/test/stride_test.cc']
  },
  {
    why: 'a page that two sequences write is accepted',
    file: 'native/core/step_check.cc',
    before: 'for (int64_t i = start / limits.page_size; i < needed; ++i) {',
    after: 'for (int64_t i = start / limits.page_size + 1; i < needed; ++i) {',
    tests: ['native/test/forward_test.cc']
  },
  {
    why: 'a token behind the end of the vocabulary is accepted',
    file: 'native/core/step_check.cc',
    before: 'if (ids[i] < 0 || ids[i] >= limit) {',
    after: 'if (ids[i] < 0 || ids[i] > limit) {',
    tests: ['native/test/forward_test.cc']
  },
  {
    why: 'an error in a pool thread is lost',
    file: 'native/core/pool.cc',
    before: 'if (s.error) std::rethrow_exception(std::exchange(s.error, nullptr));',
    after: 's.error = nullptr;',
    tests: ['native/test/pool_test.cc']
  },
  {
    why: 'the pool runs the last index never',
    file: 'native/core/pool.cc',
    before: 'f(total - rem, thread);',
    after: 'if (rem > 1) f(total - rem, thread);',
    tests: ['native/test/pool_test.cc']
  }
]
