import assert from 'node:assert'
import fc from 'fast-check'
import t from 'tap'
import { RefitError } from '../../../src/errors.ts'
import { native } from '../../../src/native/load-addon.ts'
import { readTensorBody } from '../../../src/wire/torch/body.ts'
import { readHandleLists } from '../../../src/wire/torch/handle-lists.ts'
import { packTensorBody, unpackTensorBody } from '../../../src/wire/torch/packed.ts'
import { findStorages } from '../../../src/wire/torch/find-storages.ts'
import { asMatrices } from '../../../src/wire/torch/matrix.ts'
import { describeBodies, describeLists } from '../../helpers/handle-lists.ts'
import { recordedPickles } from '../../helpers/pickles.ts'

// Pickles made of pieces of real ones. Each is read into tensors inside their storages, or refused with a RefitError
// with status 400. The storages of a refused pickle can be listed. `npm run fuzz` runs fifty times as many.

const SCALE = Number(process.env.REFIT_FUZZ ?? 1)
const gpus = ['3f0ce3ab-1111-2222-3333-0123456789ab', '3f0ce3ab-1111-2222-3333-0123456789ac']

/** Without its FRAME, whose length would refuse nearly all changes. */
const unframed = (bytes: Buffer): Buffer =>
  bytes[2] === 0x95 ? Buffer.concat([bytes.subarray(0, 2), bytes.subarray(11)]) : bytes
const unframedEntries = (cases: Array<{ entries: string[] }>): Buffer[] =>
  cases.flatMap(({ entries }) => entries).filter(entry => entry.length < 4000).map(entry =>
    unframed(Buffer.from(entry, 'base64'))
  )
const good = unframedEntries(recordedPickles('payloads'))
const real = [...good, ...unframedEntries(recordedPickles('refused'))]
const exploits = recordedPickles('exploits').map(({ pickle }) => Buffer.from(pickle, 'base64'))
const OPCODES = 'N\x88\x89()]}.012abceghijloqrstuBCGJKMQRX\x80\x81\x82\x85\x86\x87' +
  '\x8a\x8b\x8c\x8d\x8e\x8f\x90\x91\x92\x93\x94\x95\x96\x97'

const source = fc.oneof({ weight: 5, arbitrary: fc.constantFrom(...real) }, {
  weight: 1,
  arbitrary: fc.constantFrom(...exploits)
})
const piece = fc.oneof(
  {
    weight: 4,
    arbitrary: fc.tuple(source, fc.nat(), fc.nat({ max: 120 })).map(([bytes, at, length]) =>
      bytes.subarray(at % bytes.length, at % bytes.length + length)
    )
  },
  { weight: 3, arbitrary: fc.constantFrom(...OPCODES).map(opcode => Buffer.from(opcode, 'latin1')) },
  { weight: 1, arbitrary: fc.nat({ max: 255 }).map(index => Buffer.from([0x68, index])) },
  { weight: 1, arbitrary: fc.uint8Array({ maxLength: 12 }).map(bytes => Buffer.from(bytes)) }
)

/** One cut of a real pickle replaced by pieces. */
const spliced = fc.tuple(source, fc.nat(), fc.nat({ max: 8 }), fc.array(piece, { maxLength: 3 })).map(
  ([bytes, at, cut, pieces]) => {
    const start = at % bytes.length
    return Buffer.concat([bytes.subarray(0, start), ...pieces, bytes.subarray(start + cut)])
  }
)
/** A few bytes of a real pickle changed in place. */
const changed = fc
  .tuple(
    fc.constantFrom(...good),
    fc.array(fc.tuple(fc.nat(), fc.nat({ max: 255 })), { minLength: 1, maxLength: 3 })
  )
  .map(([bytes, changes]) => {
    const copy = Buffer.from(bytes)
    for (const [at, value] of changes) copy[at % copy.length] = value
    return copy
  })
const pieced = fc.array(piece, { maxLength: 30 }).map(pieces =>
  Buffer.concat([Buffer.from('8004', 'hex'), ...pieces, Buffer.from('.')])
)

function survives (bytes: Buffer, loadFormat: string | null): 'taken' | 'refused' {
  for (const storage of findStorages([bytes])) {
    if (storage.kind === 'empty') throw new Error('an empty storage is no share')
  }
  try {
    const { spares, ...body } = readTensorBody({ entries: [bytes], loadFormat, ranks: 2, gpus }, { anyDType: true })
    for (const spare of spares) if (body.storages.includes(spare)) throw new Error('a storage that is used is no spare')
    for (const tensor of body.ranks.flat()) {
      if (tensor.storage.kind !== 'empty' && !body.storages.includes(tensor.storage)) {
        throw new Error('a storage that is not in the list')
      }
      for (const { offset, rows, cols, rowBytes, colBytes } of matrices(tensor)) {
        if (offset < 0 || offset + (rows - 1) * rowBytes + (cols - 1) * colBytes >= tensor.storage.bytes) {
          throw new Error(`outside: ${JSON.stringify(tensor)}`)
        }
      }
    }
    assert.deepStrictEqual(unpackTensorBody(packTensorBody(body)), body)
    return 'taken'
  } catch (error) {
    if (!(error instanceof RefitError) || error.statusCode !== 400) throw error
    return 'refused'
  }
}

function matrices (tensor: Parameters<typeof asMatrices>[0]): ReturnType<typeof asMatrices> {
  try {
    return asMatrices(tensor)
  } catch (error) {
    if (error instanceof RefitError) return []
    throw error
  }
}

/** True if the addon's reader accepts the bytes. Then this reader must accept them too, and read the same. */
function agrees (bytes: Buffer): boolean {
  const lists = readHandleLists(native(), [bytes])
  if (lists === null) return false
  assert.deepStrictEqual(describeLists(lists, 1), describeBodies([bytes]))
  return true
}

for (
  const [what, pickles, runs] of [['real pickles with other pieces in them', spliced, 10_000], [
    'real pickles with changed bytes',
    changed,
    6000
  ], ['pieces of pickles, one after another', pieced, 4000]] as const
) {
  t.test(`${what} give tensors or a RefitError`, async t => {
    const outcomes = new Map<string, number>()
    let listed = 0
    fc.assert(
      fc.property(pickles, bytes => {
        const outcome = survives(bytes, null) === 'taken' || survives(bytes, 'flattened_bucket') === 'taken'
          ? 'taken'
          : 'refused'
        outcomes.set(outcome, (outcomes.get(outcome) ?? 0) + 1)
        if (agrees(bytes)) listed++
      }),
      { numRuns: runs * SCALE }
    )
    t.ok(outcomes.get('refused')! > runs * SCALE / 4)
    if (pickles !== changed) return
    t.ok(outcomes.get('taken')! > runs * SCALE / 20, 'many of them are still payloads')
    t.ok(listed > runs * SCALE / 500, `${listed} of them are still lists of handles`)
  })
}
