import type { Mutant } from './mutant.ts'

export const nativeTransport: readonly Mutant[] = [
  {
    why: 'a read that was interrupted begins again at the start',
    file: 'native/transport/file_read.cc',
    before: 'static_cast<off_t>(offset + result.bytes));',
    after: 'static_cast<off_t>(offset));',
    tests: ['native/test/write_test.cc']
  },
  {
    why: 'an error of a read is lost',
    file: 'native/transport/file_read.cc',
    before: `      result.error = errno;
`,
    after: '',
    tests: ['native/test/write_test.cc']
  },
  {
    why: 'a barrier of gloo ends after its first round',
    file: 'native/transport/gloo/gloo_collective.cc',
    before: `  place.distance *= 2;
  place.notified = false;`,
    after: `  place.distance = members_.size;
  place.notified = false;`,
    tests: ['native/test/gloo_test.cc']
  },
  {
    why: 'the last part of a broadcast is never received',
    file: 'native/transport/gloo/gloo_collective.cc',
    before: 'while (next_ < pieces_.size() && running_.size() < kWindow) open(next_++);',
    after: `while (next_ < pieces_.size() && running_.size() < kWindow) open(next_++);
    if (next_ == pieces_.size() && running_.size() == 1 && next_ > 1) return true;`,
    tests: ['native/test/gloo_test.cc']
  },
  {
    why: 'a rank passes bytes on before it has them',
    file: 'native/transport/gloo/gloo_collective.cc',
    before: 'if (!running.sending && (keeper_ < 0 || running.transfers[keeper_].complete)) {',
    after: 'if (!running.sending) {',
    tests: ['native/test/gloo_test.cc']
  },
  {
    why: 'children of a broadcast tree are those of another root',
    file: 'native/transport/gloo/gloo_wire.cc',
    before: 'static_cast<int>((relative + static_cast<unsigned>(root)) %',
    after: 'static_cast<int>(relative %',
    tests: ['native/test/gloo_test.cc']
  },
  {
    why: 'an address without identifiers of all ranks is accepted',
    file: 'native/transport/gloo/gloo_wire.cc',
    before: 'if (rest != 0 && rest != sizeof(int64_t) * static_cast<size_t>(size)) {',
    after: 'if (rest != 0 && rest % sizeof(int64_t) != 0) {',
    tests: ['native/test/gloo_test.cc', 'native/test/gloo_faults_test.cc']
  },
  {
    why: 'a deadline of a gloo group never passes',
    file: 'native/transport/gloo/gloo_group.cc',
    before: `if (Clock::now() >= deadline) {
        break_off`,
    after: `if (aborted_.load() && Clock::now() >= deadline) {
        break_off`,
    tests: ['native/test/gloo_faults_test.cc']
  },
  {
    why: 'a broken group can be used again',
    file: 'native/transport/gloo/gloo_group.cc',
    before: 'if (broken_.empty()) broken_ = message;',
    after: 'if (broken_.empty()) broken_.clear();',
    tests: ['native/test/gloo_faults_test.cc']
  },
  {
    why: "a sender's memory stays mapped after a write",
    file: 'native/transport/ipc/ipc_session.cc',
    before: 'open.push_back({rank, segment.mapping});',
    after: 'if (failed) open.push_back({rank, segment.mapping});',
    tests: ['native/test/ipc_test.cc']
  },
  {
    why: 'a failed write keeps its mappings open under their name',
    file: 'native/transport/ipc/ipc_session.cc',
    before: 'if (!failed && !name.empty() &&',
    after: 'if (!name.empty() &&',
    tests: ['native/test/ipc_mappings_test.cc', 'native/test/ipc_test.cc', 'test/e2e/tensor-kept.test.ts']
  },
  {
    why: 'a write begins before all events of its sender are done',
    file: 'native/transport/ipc/ipc_session.cc',
    before: 'wake_.wait(lock, [this] { return stopped_ || events_done_; });',
    after: 'if (stopped_) wake_.wait(lock, [this] { return stopped_ || events_done_; });',
    tests: ['native/test/ipc_test.cc', 'test/e2e/tensor-cuda.test.ts', 'test/e2e/tensor-cuda-faults.test.ts']
  },
  {
    why: 'the end of a segment is checked for its first tensor only',
    file: 'native/transport/ipc/ipc_plan.cc',
    before: 'if (segment.ends.empty() || segment.ends.back().first != rect.tensor) {',
    after: 'if (segment.ends.empty()) {',
    tests: ['native/test/ipc_test.cc', 'test/native/segments.test.ts']
  },
  {
    why: 'events of later segments are not awaited',
    file: 'native/transport/ipc/ipc_plan.cc',
    before: 'for (size_t e = 0; e < handles.size(); e += Segment::kHandleBytes) {',
    after: 'for (size_t e = 0; e < handles.size() && plan.events.empty(); e += Segment::kHandleBytes) {',
    tests: ['native/test/ipc_test.cc', 'test/native/segments.test.ts']
  },
  {
    why: 'two descriptors of different memory are found as one mapping',
    file: 'native/transport/ipc/ipc_mappings.cc',
    before: '[](int a, int b) { return compare_files(a, b) == 0; })) {',
    after: '[](int a, int b) { return compare_files(a, b) >= 0; })) {',
    tests: ['native/test/ipc_mappings_test.cc']
  },
  {
    why: 'releasing one name closes the mappings of all names',
    file: 'native/transport/ipc/ipc_mappings.cc',
    before: 'return close_kept([&](const std::string& its) { return its == name; });',
    after: 'return close_kept([&](const std::string& its) { return !its.empty() || its == name; });',
    tests: ['native/test/ipc_mappings_test.cc']
  },
  {
    why: 'a mapping that could not be closed is forgotten',
    file: 'native/transport/ipc/ipc_mappings.cc',
    before: `  left_open_.push_back(open);
`,
    after: '',
    tests: ['native/test/ipc_mappings_test.cc']
  },
  {
    why: 'a reference count falls below zero',
    file: 'native/transport/ipc/shared_count.cc',
    before: 'const T left = had - std::min(had, references);',
    after: 'const T left = had - references;',
    tests: ['native/test/release_test.cc']
  },
  {
    why: 'the last slot of a counter file is not given back',
    file: 'native/transport/ipc/shared_count.cc',
    before: 'if (slot < 0 || offset + 8 > file.bytes()) continue;',
    after: 'if (slot < 0 || offset + 8 >= file.bytes()) continue;',
    tests: ['native/test/release_test.cc']
  }
]
