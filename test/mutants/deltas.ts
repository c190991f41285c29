import type { Mutant } from './mutant.ts'

export const deltas: readonly Mutant[] = [
  {
    why: 'a delta is applied although the one before it did not come into use',
    file: 'src/sources/tensor/delta-bases.ts',
    before: 'if (isRefused) throw baseIsLost(wrong, lost.get(wrong)!.length)',
    after: '',
    tests: ['test/deltas/lost-bases.test.ts']
  },
  {
    why: 'a repeated delta that fails again goes behind those that were refused',
    file: 'src/sources/tensor/delta-bases.ts',
    before: 'if (sent.isRunning) list[list.indexOf(same)] = entry',
    after: 'if (sent.isRunning) list.push(...list.splice(list.indexOf(same), 1).map(() => entry))',
    tests: ['test/deltas/delta-bases.test.ts']
  },
  {
    why: 'a repeated delta makes up for all that were lost',
    file: 'src/sources/tensor/delta-bases.ts',
    before: 'if (used.length === 0 || used.some(({ sent }) => sent.isWhole)) {',
    after: 'if (used.length >= 0) {',
    tests: ['test/deltas/lost-bases.test.ts']
  },
  {
    why: 'deltas of an aborted transaction count as in use',
    file: 'src/sources/tensor/delta-bases.ts',
    before: 'isRunning || (transaction !== null && transaction === open)',
    after: 'isRunning || transaction !== null',
    tests: ['test/deltas/lost-bases.test.ts']
  },
  {
    why: 'a verification that finds differences in the second set does not repair them',
    file: 'src/updates/run-update.ts',
    before: 'const refusal = refusalOf(source, report)',
    after: 'const refusal = void source.accept?.(report)',
    tests: ['test/deltas/lost-bases.test.ts']
  },
  {
    why: 'a version is applied to the one before the last',
    file: 'src/deltas/local-checkpoint.ts',
    before: 'delta.base !== version - 1) {',
    after: 'delta.base > version - 1) {',
    tests: ['test/deltas/local-checkpoint.test.ts']
  },
  {
    why: 'an interrupted change leaves its version',
    file: 'src/deltas/local-checkpoint.ts',
    before: `  writeDurably(mark, String(version))
`,
    after: '',
    tests: ['test/deltas/local-checkpoint.test.ts']
  },
  {
    why: 'a pull starts again from the base at each version',
    file: 'src/deltas/local-checkpoint.ts',
    before: `      start = before
`,
    after: `      resetTo(baseFolder, local, 0, () => true)
      start = 0
`,
    tests: ['test/deltas/local-checkpoint.test.ts']
  },
  {
    why: 'wrong checksums of a change are not noticed',
    file: 'src/deltas/checkpoint-patch.ts',
    before: 'changes.filter((change, row) => change.checksum.toLowerCase() !== sum(row))',
    after: "changes.filter((change, row) => sum(row) === '' && change.checksum !== '')",
    tests: ['test/deltas/local-checkpoint.test.ts']
  },
  {
    why: 'files of an older checkpoint stay in the folder',
    file: 'src/deltas/checkpoint-patch.ts',
    before: 'if (!entry.isDirectory() && !files.includes(entry.name)) rmSync(join(to, entry.name))',
    after: 'if (files.length === 0) rmSync(join(to, entry.name))',
    tests: ['test/deltas/local-checkpoint.test.ts']
  },
  {
    why: 'a change of the second tensor is read from the first one',
    file: 'src/deltas/checkpoint-patch.ts',
    before: 'table[at + DELTA.begin] = begin - from',
    after: 'table[at + DELTA.begin] = changes[0]!.begin - from',
    tests: ['test/deltas/local-checkpoint.test.ts']
  },
  {
    why: 'a published link may lead out of the roots',
    file: 'src/deltas/files.ts',
    before: 'if (real === undefined || !contains(real)) {',
    after: 'if (real === undefined) {',
    tests: ['test/deltas/local-checkpoint.test.ts', 'test/deltas/delta-store.test.ts']
  },
  {
    why: 'a later run with the same version is taken for this one',
    file: 'src/deltas/delta-store.ts',
    before: 'return !existsSync(path) || digestOf(insideOf(path, contains)) === known',
    after: 'return !existsSync(path) || known.length === 64',
    tests: ['test/deltas/delta-store.test.ts']
  },
  {
    why: 'a fetch that broke off is taken for complete',
    file: 'src/deltas/delta-store.ts',
    before: 'const isSound = !state.write_in_progress && state',
    after: 'const isSound = state',
    tests: ['test/deltas/delta-store.test.ts']
  },
  {
    why: 'an older version than the held one is reported as fetched',
    file: 'src/deltas/delta-store.ts',
    before: 'if (before > target) {',
    after: 'if (before > target + 1) {',
    tests: ['test/deltas/delta-store.test.ts']
  },
  {
    why: 'a folder is loaded as another version',
    file: 'src/deltas/delta-store.ts',
    before: 'state.write_in_progress || state.version !== version) {',
    after: 'state.write_in_progress) {',
    tests: ['test/deltas/delta-store.test.ts', 'test/e2e/skyrl-weights.test.ts']
  },
  {
    why: 'equal pulls run twice',
    file: 'src/deltas/weight-pulls.ts',
    before: 'await this.#running.join(JSON.stringify(job), async',
    after: 'await this.#running.join(String(Math.random()), async',
    tests: ['test/deltas/local-checkpoint.test.ts', 'test/deltas/delta-store.test.ts', 'test/e2e/skyrl-weights.test.ts']
  },
  {
    why: 'the local folder may lie in the published one',
    file: 'src/deltas/weight-pulls.ts',
    before: 'if (inside(local, folder) || inside(folder, local)) {',
    after: 'if (inside(folder, local)) {',
    tests: ['test/deltas/local-checkpoint.test.ts', 'test/deltas/delta-store.test.ts']
  }
]
