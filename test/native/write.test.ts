import { closeSync, existsSync, openSync, truncateSync } from 'node:fs'
import t from 'tap'
import { native } from '../../src/native/load-addon.ts'
import { TENSOR_PARTIAL, TENSOR_UNTOUCHED, TENSOR_WRITTEN } from '../../src/native/write-layout.ts'
import type { DType, HeldDType } from '../../src/native/dtypes.ts'
import type { WriteJob } from '../../src/native/write-job.ts'
import { codedJob, expectedParams } from './helpers/coded.ts'
import { plainModel, readAll } from './helpers/plain-core.ts'

const addon = native()

t.test('every dtype, split and offset arrives bit for bit on every rank, from a file and from memory', async t => {
  const folder = t.testdir()
  for (const stored of ['bfloat16', 'float16', 'float32'] as const) {
    for (const ranks of [1, 2, 4]) {
      const model = plainModel({ ranks, dtype: stored })
      const core = addon.createCore(model.config)
      for (const dtype of ['bfloat16', 'float16', 'float32'] as const) {
        for (const gap of [0, 1, 3]) {
          for (const from of [undefined, folder]) {
            await addon.scramble(core, BigInt(gap))
            const before = await readAll(addon, core, model)
            const coded = codedJob(model.tensors, { dtype, gap, folder: from })
            const outcome = await addon.write(core, coded.job)
            if (coded.fd !== undefined) closeSync(coded.fd)
            const what = `${dtype} to ${stored}, ${ranks} ranks, gap ${gap}, ${from === undefined ? 'memory' : 'file'}`
            t.notOk(outcome.error, what)
            t.ok(outcome.states.every(state => state === TENSOR_WRITTEN))
            t.equal(outcome.bytes, coded.bytes, 'each byte is read once for all ranks')
            t.ok(same(await readAll(addon, core, model), expectedParams(model, model.tensors, dtype, before)), what)
          }
        }
      }
      addon.closeCore(core)
    }
  }
})

t.test('NaN, infinities, subnormals and ties convert as defined', async t => {
  const edges: Record<DType, number[]> = {
    // Ties that round up and down to even, just above a tie, largest finite (becomes infinity), NaN with a low payload.
    float32: [
      0x3f808000,
      0x3f818000,
      0x3f808001,
      0x7f7fffff,
      0x7f800001,
      0xff800000,
      0x00000001,
      0x80000000,
      0x00008000,
      0x7fc00000
    ],
    // Smallest and largest subnormal, smallest normal, infinities, NaN, -0, largest finite, a tie that rounds to even.
    float16: [0x0001, 0x03ff, 0x0400, 0x7c00, 0xfc00, 0x7e01, 0x8000, 0x7bff, 0x3c04, 0x3c0c],
    bfloat16: [0x7f80, 0xff80, 0x7fc0, 0x0001, 0x8000, 0x7f7f, 0x7f81, 0x3f80, 0x0080, 0x007f]
  }
  const wanted: Record<string, number[]> = {
    'float32 to bfloat16': [0x3f80, 0x3f82, 0x3f81, 0x7f80, 0x7fc0, 0xff80, 0x0000, 0x8000, 0x0000, 0x7fc0],
    'float32 to float16': [0x3c04, 0x3c0c, 0x3c04, 0x7c00, 0x7e00, 0xfc00, 0x0000, 0x8000, 0x0000, 0x7e00],
    'bfloat16 to float16': [0x7c00, 0xfc00, 0x7e00, 0x0000, 0x8000, 0x7c00, 0x7e08, 0x3c00, 0x0000, 0x0000],
    'float16 to float32': [
      0x33800000,
      0x387fc000,
      0x38800000,
      0x7f800000,
      0xff800000,
      0x7fc02000,
      0x80000000,
      0x477fe000,
      0x3f808000,
      0x3f818000
    ],
    'float16 to bfloat16': [0x3380, 0x3880, 0x3880, 0x7f80, 0xff80, 0x7fc0, 0x8000, 0x4780, 0x3f80, 0x3f82],
    'bfloat16 to float32': [
      0x7f800000,
      0xff800000,
      0x7fc00000,
      0x00010000,
      0x80000000,
      0x7f7f0000,
      0x7f810000,
      0x3f800000,
      0x00800000,
      0x007f0000
    ]
  }
  for (const [what, values] of Object.entries(wanted)) {
    const [from, to] = what.split(' to ') as [DType, HeldDType]
    const model = plainModel({ dtype: to })
    const core = addon.createCore(model.config)
    const norm = model.tensors.filter(tensor => tensor.name === 'norm')
    await addon.write(core, codedJob(norm, { dtype: from, gap: 1, bits: (_, i) => edges[from][i % 10]! }).job)
    const read = await addon.read(core, 0, 7, 0, 0, 64, 1)
    const got = to === 'float32' ? new Uint32Array(read.buffer) : new Uint16Array(read.buffer)
    t.same([...got], Array.from({ length: 64 }, (_, i) => values[i % 10]), what)
    addon.closeCore(core)
  }
})

t.test('rows and columns outside the rectangles are neither read nor changed', async t => {
  const model = plainModel()
  const core = addon.createCore(model.config)
  await addon.scramble(core, 1n)
  const before = await readAll(addon, core, model)
  const part = [{ name: 'gate', rows: 96, cols: 64, rects: [[0, 5, 90, 10, 5, 20, 100, 30]] }] as typeof model.tensors
  const coded = codedJob(part, { folder: t.testdir() })
  const outcome = await addon.write(core, coded.job)
  closeSync(coded.fd!)
  t.equal(outcome.bytes, (4 * 64 + 20) * 2, 'from the first needed byte to the last')
  t.ok(same(await readAll(addon, core, model), expectedParams(model, part, 'bfloat16', before)))
  addon.closeCore(core)
})

t.test('a read gives any rectangle of a parameter', async t => {
  const model = plainModel({ ranks: 2 })
  const core = addon.createCore(model.config)
  await addon.write(core, codedJob(model.tensors).job)
  const whole = Buffer.from(await addon.read(core, 1, 5, 0, 0, 96, 64))
  const part = Buffer.from(await addon.read(core, 1, 5, 7, 9, 80, 11))
  for (let r = 0; r < 80; r++) {
    t.ok(part.subarray(r * 22, r * 22 + 22).equals(whole.subarray(((7 + r) * 64 + 9) * 2, ((7 + r) * 64 + 20) * 2)))
  }
  t.equal((await addon.read(core, 0, 0, 64, 64, 0, 0)).length, 0, 'an empty one too')
  addon.closeCore(core)
})

t.test('a file that ends early is named with both positions, and earlier tensors count as written', async t => {
  const model = plainModel({ ranks: 2 })
  const core = addon.createCore(model.config)
  const coded = codedJob(model.tensors, { folder: t.testdir() })
  // Truncates the last tensor; all others are complete.
  truncateSync(coded.path!, coded.ends.at(-1)! - 1)
  const outcome = await addon.write(core, coded.job)
  t.match(outcome.error, {
    message: `file ended at byte ${coded.ends.at(-1)! - 1}, expected ${coded.ends.at(-1)}`,
    tensor: model.tensors.length - 1
  })
  t.not(outcome.states.at(-1), TENSOR_WRITTEN)
  truncateSync(coded.path!, 0)
  const nothing = await addon.write(core, coded.job)
  t.match(nothing.error!.message, /^file ended at byte 0, expected /)
  t.ok(nothing.states.every(state => state === TENSOR_UNTOUCHED))
  t.equal(nothing.bytes, 0)
  closeSync(coded.fd!)
  addon.closeCore(core)
})

t.test('a read that breaks off inside a parameter makes it partial, and those after it stay untouched', async t => {
  for (const ranks of [1, 2]) {
    const model = plainModel({ ranks, threads: 1 })
    const core = addon.createCore(model.config)
    await addon.scramble(core, 1n)
    const before = await readAll(addon, core, model)
    const { dtype } = model.config
    for (const [at, tensor] of model.tensors.entries()) {
      await addon.scramble(core, 1n)
      const coded = codedJob(model.tensors, { dtype, folder: t.testdir() })
      const begin = at === 0 ? 0 : coded.ends[at - 1]!
      const rowBytes = 2 * tensor.cols
      // After some rows, or elements of a vector.
      truncateSync(coded.path!, begin + 4 * rowBytes)
      const outcome = await addon.write(core, coded.job)
      closeSync(coded.fd!)
      t.equal(outcome.error?.tensor, at)
      // Only a tensor that is split by columns is read into a buffer first; all others go straight to their place.
      const isStraight = ranks === 1 || !['o', 'down'].includes(tensor.name)
      t.same(
        [...outcome.states],
        model.tensors.map((_, i) =>
          i < at ? TENSOR_WRITTEN : i === at && isStraight ? TENSOR_PARTIAL : TENSOR_UNTOUCHED
        ),
        `${ranks} ranks, broken off in ${tensor.name}`
      )
      const after = await readAll(addon, core, model)
      const changed = tensor.rects.some(([rank, param, , , , , dstRow, dstCol]) => {
        const { cols } = model.config.params[param]!
        const i = rank * model.config.params.length + param
        const first = 2 * (dstRow * cols + dstCol)
        return !same([after[i]!.subarray(first, first + 8)], [before[i]!.subarray(first, first + 8)])
      })
      t.equal(changed, isStraight, `${tensor.name}: the state is that of the bytes`)
    }
    addon.closeCore(core)
  }
})

t.test('a file descriptor may be closed, and its number given to another file, while the write runs', async t => {
  const model = plainModel({ hidden: 512, vocab: 8192 })
  const core = addon.createCore(model.config)
  const before = await readAll(addon, core, model)
  const coded = codedJob(model.tensors, { folder: t.testdir({ other: 'x'.repeat(100) }) })
  const writing = addon.write(core, coded.job)
  closeSync(coded.fd!)
  // The system reuses the lowest free number, here or in a thread of Node that is faster.
  const others: number[] = []
  while (!existsSync(`/proc/self/fd/${coded.fd!}`)) others.push(openSync(`${t.testdirName}/other`, 'r'))
  t.notOk((await writing).error)
  for (const other of others) closeSync(other)
  t.ok(same(await readAll(addon, core, model), expectedParams(model, model.tensors, 'bfloat16', before)))
  addon.closeCore(core)
})

t.test('malformed jobs throw, name the mistake and change nothing', async t => {
  const model = plainModel({ ranks: 2 })
  const core = addon.createCore(model.config)
  await addon.scramble(core, 1n)
  const before = await readAll(addon, core, model)
  const good = codedJob(model.tensors)
  const changed = (field: 'tensors' | 'rects', index: number, value: number): WriteJob => {
    const copy = { ...good.job, [field]: good.job[field].slice() }
    copy[field][index] = value
    return copy
  }
  const writing = (job: unknown): () => unknown => () => addon.write(core, job as WriteJob)
  const cases: Array<[string, unknown, RegExp]> = [
    ['no job', undefined, /^job: expected an object, got undefined$/],
    ['no sources', { ...good.job, sources: undefined }, /^job.sources: expected an array, got undefined$/],
    [
      'an empty source',
      { ...good.job, sources: [{}] },
      /^job.sources\[0\]: expected one of fd, buffer, segment and staged$/
    ],
    [
      'both kinds at once',
      { ...good.job, sources: [{ fd: 0, buffer: new Uint8Array(1) }] },
      /expected one of fd, buffer, segment and staged/
    ],
    [
      'a closed descriptor',
      { ...good.job, sources: [{ fd: 987654 }] },
      /^job.sources\[0\].fd: cannot use file descriptor 987654: Bad file descriptor$/
    ],
    [
      'a fraction as descriptor',
      { ...good.job, sources: [{ fd: 1.5 }] },
      /fd: expected an integer from 0 to 2147483647, got 1.5/
    ],
    [
      'another typed array',
      { ...good.job, sources: [{ buffer: new Uint16Array(4) }] },
      /buffer: expected Uint8Array, got a typed array of another type/
    ],
    [
      'resizable memory',
      { ...good.job, sources: [{ buffer: new Uint8Array(resizable(1 << 20)) }] },
      /got a resizable buffer/
    ],
    [
      'detached memory',
      { ...good.job, sources: [{ buffer: detached(1 << 20) }] },
      /^job.sources\[0\].buffer: its ArrayBuffer is detached$/
    ],
    ['tensors of another type', { ...good.job, tensors: new Float32Array(6) }, /^job.tensors: expected Float64Array/],
    [
      'a broken record',
      { ...good.job, tensors: new Float64Array(8) },
      /^job.tensors: expected a multiple of 7 entries, got 8$/
    ],
    [
      'a broken rectangle',
      { ...good.job, rects: new Float64Array(10) },
      /^job.rects: expected a multiple of 9 entries, got 10$/
    ],
    ['an unknown source', changed('tensors', 0, 1), /^tensor 0: source 1 does not exist, there are 1$/],
    ['an unknown dtype', changed('tensors', 2, 3), /^job.tensors\[0\].dtype: expected an integer from 0 to 2, got 3$/],
    [
      'a tensor beyond its source',
      changed('tensors', 1, 1e6),
      /^tensor 0: ends at byte 1016384, but source 0 has \d+$/
    ],
    ['an offset that is not whole', changed('tensors', 1, 0.5), /^job.tensors\[0\].offset: expected an integer/],
    ['a negative offset', changed('tensors', 1, -1), /^job.tensors\[0\].offset/],
    ['an offset that is NaN', changed('tensors', 1, NaN), /offset: .* got NaN/],
    ['an unsafe number', changed('tensors', 1, 2 ** 53), /offset: expected an integer from 0 to 9007199254740991/],
    ['rows that overflow', changed('tensors', 3, 2 ** 53 - 1), /^tensor 0: (ends|shape)/],
    ['a pitch below the width', changed('tensors', 5, 127), /^tensor 0: 127 bytes from row to row, but a row has 128$/],
    ['columns too far apart', changed('tensors', 6, 1e6), /^tensor 0: ends at byte 63016258, but source 0 has \d+$/],
    ['columns that overflow', changed('tensors', 6, 2 ** 53 - 1), /^tensor 0: ends at byte \d+, but source 0 has \d+$/],
    [
      'a negative column stride',
      changed('tensors', 6, -2),
      /^job.tensors\[0\].colBytes: expected an integer from 0 to 9007199254740991, got -2$/
    ],
    ['an unknown tensor', changed('rects', good.job.rects.length - 9, 99), /the tensor does not exist, there are 11$/],
    ['unsorted rectangles', changed('rects', 0, 5), /must be sorted by tensor$/],
    ['an unknown rank', changed('rects', 1, 2), /^rectangle 0 \(tensor 0\): rank 2 does not exist, there are 2$/],
    ['an unknown parameter', changed('rects', 2, 8), /parameter 8 does not exist, there are 8$/],
    [
      'source rows outside',
      changed('rects', 3, 65),
      /^rectangle 0 \(tensor 0\): rows 65 \+ 64 exceed its shape \[128, 64\]$/
    ],
    ['source columns outside', changed('rects', 4, 1), /columns 1 \+ 64 exceed its shape \[128, 64\]$/],
    ['more rows than the parameter', changed('rects', 5, 65), /rows 0 \+ 65 exceed parameter embed \[64, 64\]$/],
    ['destination rows outside', changed('rects', 7, 1), /rows 1 \+ 64 exceed parameter embed \[64, 64\]$/],
    ['destination columns outside', changed('rects', 8, 1), /columns 1 \+ 64 exceed parameter embed \[64, 64\]$/],
    [
      'rectangles that overlap',
      changed('rects', 9 * 8 + 7, 31),
      /^rectangle \d \(tensor \d\): overlaps rectangle (\d \(tensor \d\) in parameter layers.0.qkv of rank 0$|8)/
    ]
  ]
  for (const [what, job, message] of cases) t.throws(writing(job), { message }, what)
  t.throws(() => addon.write(99, good.job), { message: 'no core has handle 99: it was never created, or closed' })
  t.throws(() => addon.read(core, 0, 0, 60, 0, 5, 1), { message: 'read: rows 60 + 5 exceed parameter embed [64, 64]' })
  t.throws(() => addon.read(core, 2, 0, 0, 0, 1, 1), { message: 'read: rank 2 does not exist, there are 2' })
  t.throws(() => addon.read(core, 0, 0, 0, 0, 1, -1), { message: /^cols: expected an integer from 0/ })
  t.ok(same(await readAll(addon, core, model), before))
  addon.closeCore(core)
})

function same (a: Uint8Array[], b: Uint8Array[]): boolean {
  return a.length === b.length && a.every((bytes, i) => Buffer.compare(bytes, b[i]!) === 0)
}

function resizable (bytes: number): ArrayBuffer {
  return new (ArrayBuffer as unknown as new(n: number, o: object) => ArrayBuffer)(bytes, { maxByteLength: bytes })
}

function detached (bytes: number): Uint8Array {
  const array = new Uint8Array(bytes)
  structuredClone(array.buffer, { transfer: [array.buffer] })
  return array
}
