import { closeSync, openSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import type { AnnouncedTensor, StoredSource } from '../../src/contract/weight-source.ts'
import { copyTensors } from '../../src/sources/tensor/copied-tensors.ts'
import { TENSOR } from '../../src/sources/tensor/tensor.ts'
import { joinSources } from '../../src/updates/join-sources.ts'

const BYTES = Buffer.from(Array.from({ length: 256 }, (_, index) => index))
const SEGMENT = { uuid: 'GPU-1', handle: new Uint8Array(64), events: new Uint8Array() }

/** Two rows of two elements, 20 bytes apart, from byte 100 on. */
const STRIDED: AnnouncedTensor = {
  name: 'strided',
  dtype: 'bfloat16',
  shape: [2, 2],
  source: 1,
  offset: 100,
  parts: [{ firstRow: 0, rows: 2, cols: 2, offset: 100, rowBytes: 20, colBytes: 4 }]
}

function stored (tensors: readonly AnnouncedTensor[], sources: StoredSource['sources']): StoredSource {
  return { kind: 'stored', transport: TENSOR, tensors, sources, verify: async () => {}, close: async () => {} }
}

const bufferOf = ({ sources }: StoredSource, index: number): Buffer =>
  Buffer.from((sources[index] as { buffer: Uint8Array }).buffer)

t.test('a copy has the bytes that its tensors lie in, at new offsets', async t => {
  const path = join(t.testdir(), 'memory')
  writeFileSync(path, BYTES)
  const fd = openSync(path, 'r')
  t.teardown(() => {
    closeSync(fd)
  })
  const tensors: AnnouncedTensor[] = [
    { name: 'b', dtype: 'float32', shape: [2], source: 2, offset: 80 },
    STRIDED,
    { name: 'a', dtype: 'float32', shape: [2, 3], source: 2, offset: 40 },
    { name: 'empty', dtype: 'float32', shape: [0, 3], source: 2, offset: 64 }
  ]
  const reads: number[][] = []
  const fetch = async (_: unknown, offset: number, bytes: number): Promise<Uint8Array> => {
    reads.push([offset, bytes])
    return BYTES.subarray(offset, offset + bytes)
  }
  const copy = await copyTensors(stored(tensors, [{ fd: -1 }, { segment: SEGMENT }, { fd }]), tensors, fetch)
  writeFileSync(path, Buffer.alloc(256))
  t.same(copy.tensors.map(({ name, source, offset }) => [name, source, offset]), [
    ['b', 0, 40],
    ['strided', 1, 0],
    ['a', 0, 0],
    ['empty', 0, 24]
  ])
  t.same(bufferOf(copy, 0), BYTES.subarray(40, 88))
  t.same(copy.tensors[1]!.parts, [{ firstRow: 0, rows: 2, cols: 2, offset: 0, rowBytes: 20, colBytes: 4 }])
  // Its last element begins at byte 124.
  t.same(bufferOf(copy, 1), BYTES.subarray(100, 126))
  t.same(reads, [[100, 26]])
  const other = await copyTensors(stored([STRIDED], [{ fd: -1 }, { segment: SEGMENT }]), [STRIDED], fetch)
  const joined = joinSources([copy, other])
  t.same(joined.tensors.map(({ source }) => source), [0, 1, 0, 0, 2])
  t.equal(joined.sources.length, 3)
})

t.test('memory that cannot be read is refused with the name of a tensor', async t => {
  const source = stored([STRIDED], [{ fd: -1 }, { segment: SEGMENT }])
  await t.rejects(copyTensors(source, [STRIDED], undefined), {
    code: 'TENSOR_PAYLOAD',
    message: /"strided".*GPU that this process does not read/
  })
  await t.rejects(
    copyTensors(source, [STRIDED], async () => {
      throw new Error('the trainer has ended')
    }),
    { code: 'TENSOR_PAYLOAD', message: /"strided": the trainer has ended/ }
  )
  const huge = { ...STRIDED, parts: [{ ...STRIDED.parts![0]!, rowBytes: 2 ** 52 }] }
  await t.rejects(copyTensors(source, [huge], undefined), {
    code: 'NO_MEMORY',
    message: /no host memory for 45\d+ bytes/
  })
})
