import fc from 'fast-check'
import t from 'tap'
import { RefitError } from '../../../src/errors.ts'
import { keysAnswer, numberAnswer, pingAnswer, valueAnswer, valuesAnswer } from '../../../src/wire/store/answer.ts'
import { keyBytes, keyText } from '../../../src/wire/store/fields.ts'
import { STORE_LIMITS, wireKey } from '../../../src/wire/store/protocol.ts'
import { PullBuffer, Pulling } from '../../../src/wire/store/pull.ts'
import type { Pull } from '../../../src/wire/store/pull.ts'
import {
  checkReply,
  keysReply,
  numberReply,
  pingReply,
  valueReply,
  valuesReply,
  waitReply
} from '../../../src/wire/store/reply.ts'
import { encodeRequests, validate } from '../../../src/wire/store/request.ts'
import type { StoreRequest } from '../../../src/wire/store/request.ts'
import { readHandshake, readRequest } from '../../../src/wire/store/request-reader.ts'

const hex = (text: string): Buffer => Buffer.from(text.replaceAll(' ', ''), 'hex')
const key = fc.uint8Array({ maxLength: 40 }).map(bytes => Buffer.from(bytes).toString('latin1'))
const value = fc.uint8Array({ maxLength: 300 }).map(bytes => Buffer.from(bytes))
const keys = fc.array(key, { maxLength: 20 })
const number = fc.maxSafeInteger()
const request: fc.Arbitrary<StoreRequest> = fc.oneof(
  fc.record({ op: fc.constantFrom('SET' as const, 'APPEND' as const), key, value }),
  fc.record({ op: fc.constant('COMPARE_SET' as const), key, expected: value, desired: value }),
  fc.record({ op: fc.constantFrom('GET' as const, 'DELETE_KEY' as const), key }),
  fc.record({ op: fc.constant('ADD' as const), key, delta: number }),
  fc.record({ op: fc.constantFrom('CHECK' as const, 'WAIT' as const, 'MULTI_GET' as const), keys }),
  fc.record({
    op: fc.constant('MULTI_SET' as const),
    pairs: fc.array(fc.tuple(key, value as fc.Arbitrary<Uint8Array>), { maxLength: 8 })
  }),
  fc.record({ op: fc.constantFrom('NUM_KEYS' as const, 'CANCEL_WAIT' as const, 'LIST_KEYS' as const) }),
  fc.record({ op: fc.constant('PING' as const), nonce: fc.nat(2 ** 32 - 1) })
)

/** Reads messages from `bytes`, which arrive in chunks of these sizes, repeated. */
function readAll<T> (bytes: Buffer, sizes: number[], readers: Array<() => Pull<T>>): { values: T[], left: number } {
  const buffer = new PullBuffer()
  const values: T[] = []
  let current = new Pulling(readers[0]!())
  for (let at = 0, i = 0; at < bytes.length; i++) {
    const size = sizes[i % sizes.length]!
    buffer.push(bytes.subarray(at, at + size))
    at += size
    for (let got = current.run(buffer); got !== undefined; got = current.run(buffer)) {
      values.push(got.value)
      if (values.length === readers.length) return { values, left: buffer.length + Math.max(0, bytes.length - at) }
      current = new Pulling(readers[values.length]!())
    }
  }
  return { values, left: buffer.length }
}

t.test('encoded requests equal the bytes that torch sends', async t => {
  const wire = (text: string): string => keyBytes(wireKey(text))
  for (
    const [requests, bytes] of [
      [[validate()], '00 cef7853c'],
      [[{ op: 'ADD', key: 'init/', delta: 1 }], '04 0500000000000000 696e69742f 0100000000000000'],
      [[{ op: 'ADD', key: 'init/', delta: -2 }], '04 0500000000000000 696e69742f feffffffffffffff'],
      [
        [{ op: 'WAIT', keys: [wire('grp/grp//cuda//0')] }],
        '06 0100000000000000 1100000000000000 2f6772702f6772702f2f637564612f2f30'
      ],
      [[{ op: 'GET', key: wire('grp/grp//cuda//0') }], '03 1100000000000000 2f6772702f6772702f2f637564612f2f30'],
      [[{ op: 'SET', key: wire('k'), value: Buffer.from('val') }], '01 0200000000000000 2f6b 0300000000000000 76616c'],
      [[{ op: 'PING', nonce: 4242 }], '0d 92100000'],
      [
        [{ op: 'SET', key: wire('ü'), value: Buffer.alloc(0) }, { op: 'CANCEL_WAIT' }],
        '01 0300000000000000 2fc3bc 0000000000000000 0c'
      ]
    ] as Array<[StoreRequest[], string]>
  ) t.strictSame(encodeRequests(...requests), hex(bytes), bytes)
  t.equal(keyText(wire('größe')), '/größe')
})

t.test('replies of torch are read', async t => {
  const read = <T>(reader: Pull<T>, bytes: string): T => readAll(hex(bytes), [3], [() => reader]).values[0]!
  const id = 'ab'.repeat(128)
  t.equal(read(numberReply(), '0200000000000000'), 2)
  t.strictSame(read(valueReply(), `8000000000000000 ${id}`), hex(id))
  t.strictSame(read(valuesReply(2), '0000000000000000 0100000000000000 37'), [Buffer.alloc(0), Buffer.from('7')])
  t.equal(read(checkReply(), '00'), true)
  t.equal(read(checkReply(), '01'), false)
  t.equal(read(waitReply(() => false), '00'), true)
  t.equal(read(waitReply(() => true), '01'), false)
  t.strictSame(
    readAll(hex('00 01'), [1], [() => waitReply(() => true)]),
    { values: [true], left: 0 },
    'a wait that ended just before it was cancelled'
  )
  t.throws(() => read(waitReply(() => false), '01'), { code: 'STORE_PROTOCOL' }, 'the wait was not cancelled')
  t.throws(() => read(waitReply(() => true), '00 00'), { code: 'STORE_PROTOCOL' })
  t.throws(() => read(checkReply(), '02'), { code: 'STORE_PROTOCOL' })
  t.throws(() => read(pingReply(1), '02000000'), { code: 'STORE_PROTOCOL' })
  t.throws(() => read(numberReply(), 'ffffffffffffff7f'), { code: 'STORE_PROTOCOL' })
})

t.test('any requests are read as they were written, from pieces of any size', async t => {
  fc.assert(
    fc.property(
      fc.array(request, { minLength: 1, maxLength: 6 }),
      fc.array(fc.integer({ min: 1, max: 50 }), { minLength: 1, maxLength: 5 }),
      (requests, sizes) => {
        const { values, left } = readAll(encodeRequests(validate(), ...requests), sizes, [
          readHandshake,
          ...requests.map(() => readRequest)
        ])
        if (left !== 0 || JSON.stringify(values) !== JSON.stringify([validate(), ...requests])) {
          throw new Error(`${left} left of ${JSON.stringify(requests)}: ${JSON.stringify(values)}`)
        }
      }
    ),
    { numRuns: 500 }
  )
  t.pass()
})

t.test('any replies are read as they were written, from pieces of any size', async t => {
  fc.assert(
    fc.property(
      fc.array(value, { maxLength: 8 }),
      keys,
      number,
      fc.array(fc.integer({ min: 1, max: 50 }), { minLength: 1, maxLength: 5 }),
      (values, names, count, sizes) => {
        const bytes = Buffer.concat([
          valuesAnswer(values),
          keysAnswer(names),
          numberAnswer(count),
          pingAnswer(7),
          ...values.map(valueAnswer)
        ])
        const readers: Array<() => Pull<unknown>> = [
          () => valuesReply(values.length),
          keysReply,
          numberReply,
          () => pingReply(7),
          ...values.map(() => () => valueReply())
        ]
        const got = readAll(bytes, sizes, readers)
        const expected = [values, names, count, undefined, ...values]
        if (got.left !== 0 || JSON.stringify(got.values) !== JSON.stringify(expected)) {
          throw new Error(JSON.stringify({ got, expected }))
        }
      }
    ),
    { numRuns: 500 }
  )
  t.pass()
})

t.test('random bytes are refused or incomplete, and never require more than the limit', async t => {
  const readers: Array<() => Pull<unknown>> = [
    readHandshake,
    readRequest,
    numberReply,
    valueReply,
    () => valuesReply(3),
    checkReply,
    () => waitReply(() => true),
    () => pingReply(1),
    keysReply
  ]
  let refused = 0
  fc.assert(
    fc.property(fc.constantFrom(...readers), fc.uint8Array({ maxLength: 60 }), (make, bytes) => {
      const reader = make()
      const buffer = new PullBuffer()
      buffer.push(bytes)
      try {
        for (let step = reader.next(); step.done !== true;) {
          if (step.value > STORE_LIMITS.valueBytes) throw new Error(`asks for ${step.value} bytes`)
          const taken = buffer.take(step.value)
          if (taken === undefined) return
          step = reader.next(taken)
        }
      } catch (error) {
        if (!(error instanceof RefitError && error.code === 'STORE_PROTOCOL')) throw error
        refused++
      }
    }),
    { numRuns: 3000 }
  )
  t.ok(refused > 300)
})

t.test('lengths and counts beyond the limits are refused before their bytes arrive', async t => {
  const u64 = (number: bigint): string => {
    const bytes = Buffer.alloc(8)
    bytes.writeBigUInt64LE(number)
    return bytes.toString('hex')
  }
  const { keyBytes, valueBytes, keys, messageBytes } = STORE_LIMITS
  for (
    const [what, make, bytes] of [
      ['key', readRequest, `03 ${u64(BigInt(keyBytes) + 1n)}`],
      ['value', readRequest, `01 ${u64(1n)} 61 ${u64(BigInt(valueBytes) + 1n)}`],
      ['value of 2^64 - 1', readRequest, `01 ${u64(1n)} 61 ${u64(2n ** 64n - 1n)}`],
      ['keys', readRequest, `06 ${u64(BigInt(keys) + 1n)}`],
      ['pairs', readRequest, `0b ${u64(BigInt(keys) + 1n)}`],
      ['reply', valueReply, u64(BigInt(valueBytes) + 1n)],
      ['listed keys', keysReply, u64(2n ** 63n)]
    ] as Array<[string, () => Pull<unknown>, string]>
  ) t.throws(() => readAll(hex(bytes), [1], [make]), { code: 'STORE_PROTOCOL', message: /at most \d+ is taken/ }, what)
  const big = Buffer.alloc(valueBytes)
  const pairs: Array<[string, Uint8Array]> = Array.from(
    { length: messageBytes / valueBytes + 1 },
    (_, i) => [`k${i}`, big]
  )
  t.throws(() => readAll(encodeRequests({ op: 'MULTI_SET', pairs }), [1 << 20], [readRequest]), {
    code: 'STORE_PROTOCOL'
  }, 'values that are too many together')
  t.throws(() => encodeRequests({ op: 'GET', key: 'k'.repeat(keyBytes + 1) }), { code: 'INVALID_REQUEST' })
  t.throws(() => encodeRequests({ op: 'SET', key: 'k', value: Buffer.alloc(valueBytes + 1) }), {
    code: 'INVALID_REQUEST'
  })
})

t.test('a wrong handshake and an unknown opcode are refused', async t => {
  for (const bytes of ['00 cef7853d', '01', '0d', '47']) {
    t.throws(() => readAll(hex(bytes), [9], [readHandshake]), { code: 'STORE_PROTOCOL' }, bytes)
  }
  for (const bytes of ['00', '0e', '12', 'ff']) {
    t.throws(() => readAll(hex(bytes), [9], [readRequest]), { code: 'STORE_PROTOCOL' }, bytes)
  }
})

t.test('bytes that are pushed in pieces of any size can be read in pieces of any size, in order', async t => {
  const steps = fc.array(fc.record({ push: fc.boolean(), size: fc.integer({ min: 0, max: 9000 }) }), { maxLength: 40 })
  fc.assert(
    fc.property(steps, steps => {
      const buffer = new PullBuffer()
      const code = (at: number): number => at * 31 % 251
      let pushed = 0
      let taken = 0
      for (const { push, size } of steps) {
        if (push) {
          buffer.push(Buffer.from(Array.from({ length: size }, (_, i) => code(pushed + i))))
          pushed += size
          continue
        }
        const got = buffer.take(size)
        if ((got === undefined) !== (size > pushed - taken)) throw new Error(`${size} of ${pushed - taken}`)
        if (got === undefined) continue
        if (got.length !== size || !got.every((byte, i) => byte === code(taken + i))) {
          throw new Error(`other bytes at ${taken}`)
        }
        taken += size
      }
      if (buffer.length !== pushed - taken) throw new Error(`${buffer.length} left of ${pushed - taken}`)
    }),
    { numRuns: 200 }
  )
  t.pass()
})

t.test('reading a big value byte by byte takes time in proportion to its size', async t => {
  const bytes = valueAnswer(Buffer.alloc(1 << 20, 7))
  t.strictSame(readAll(bytes, [1], [() => valueReply()]).values, [Buffer.alloc(1 << 20, 7)])
})
