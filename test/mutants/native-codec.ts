import type { Mutant } from './mutant.ts'

export const nativeCodec: readonly Mutant[] = [
  {
    why: 'a second piece of a change is read from the beginning of its tensor',
    file: 'native/codec/tensor_delta.cc',
    before: `read_all(delta.fd, bytes.data(), size, delta.offset + done);
    if (std::any_of`,
    after: `read_all(delta.fd, bytes.data(), size, delta.offset);
    if (std::any_of`,
    tests: ['native/test/delta_test.cc']
  },
  {
    why: 'bytes after the end of a change are not noticed',
    file: 'native/codec/tensor_delta.cc',
    before: 'if (change.read(&more, 1) != 0) throw',
    after: 'if (change.read(&more, 0) != 0) throw',
    tests: ['native/test/delta_refusals_test.cc']
  },
  {
    why: 'a position at the end of a tensor is written behind it',
    file: 'native/codec/tensor_delta.cc',
    before: 'if (position >= delta.bytes) throw',
    after: 'if (position > delta.bytes) throw',
    tests: ['native/test/delta_refusals_test.cc']
  },
  {
    why: 'positions that fall are applied piece by piece',
    file: 'native/codec/tensor_delta.cc',
    before: 'if (position < last) out.rises = false;',
    after: 'if (position > last) out.rises = true;',
    tests: ['native/test/delta_test.cc']
  },
  {
    why: 'the first error of several threads is lost',
    file: 'native/codec/tensor_delta.cc',
    before: 'if (!error.empty()) throw std::runtime_error(error);',
    after: 'if (error.size() > 1000) throw std::runtime_error(error);',
    tests: ['native/test/delta_refusals_test.cc']
  },
  {
    why: 'a change in several frames ends with its first frame',
    file: 'native/codec/zstd_stream.cc',
    before: 'if (stuck || (at_ == size_ && result == 0)) break;',
    after: 'if (stuck || result == 0) break;',
    tests: ['native/test/delta_test.cc', 'native/test/delta_refusals_test.cc']
  },
  {
    why: 'a tensor may end behind its storage',
    file: 'native/codec/handle_list.cc',
    before: 'if ((start + elements) * item_bytes > bytes ||',
    after: 'if (elements * item_bytes > bytes ||',
    tests: ['native/test/handle_list_test.cc']
  },
  {
    why: 'the offset of a tensor in its storage is lost',
    file: 'native/codec/handle_list.cc',
    before: 'static_cast<double>(offset + start * item_bytes)',
    after: 'static_cast<double>(offset + start)',
    tests: ['native/test/handle_list_test.cc']
  },
  {
    why: 'a view with gaps is read as if it were packed',
    file: 'native/codec/handle_list.cc',
    before: 'if (size > 1 && static_cast<uint64_t>(steps[axis].integer()) != elements) return false;',
    after: 'if (size > 2 && static_cast<uint64_t>(steps[axis].integer()) != elements) return false;',
    tests: ['native/test/handle_list_test.cc']
  },
  {
    why: 'one reference counter for two storages is accepted',
    file: 'native/codec/handle_list.cc',
    before: 'return other.segment == storage.segment && other.offset == storage.offset &&',
    after: 'return other.segment == storage.segment &&',
    tests: ['native/test/handle_list_test.cc']
  },
  {
    why: 'the event of a second stream is left out',
    file: 'native/codec/handle_list.cc',
    before: 'if (!found.events.empty() && found.events.back() == event) return true;',
    after: 'if (!found.events.empty()) return true;',
    tests: ['native/test/handle_list_test.cc']
  },
  {
    why: 'surrogates pass as UTF-8',
    file: 'native/codec/utf8.cc',
    before: 'const uint8_t high = lead == 0xed ? 0x9f :',
    after: 'const uint8_t high = lead == 0xed ? 0xbf :',
    tests: ['native/test/pickle_test.cc']
  },
  {
    why: 'bytes as text may hold a character past U+00FF',
    file: 'native/codec/pickle_objects.cc',
    before: 'if (from[at] > 0xc3) malformed',
    after: 'if (from[at] > 0xc4) malformed',
    tests: ['native/test/pickle_test.cc', 'test/wire/pickle/read.test.ts']
  }
]
