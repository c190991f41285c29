import fc from 'fast-check'
import t from 'tap'
import { RefitError } from '../../../src/errors.ts'
import { headerLength, MAX_HEADER_BYTES, MAX_TENSORS, parseHeader } from '../../../src/wire/safetensors/header.ts'
import type { SafetensorsHeader } from '../../../src/wire/safetensors/header.ts'
import { SAFETENSORS_BITS, toDType } from '../../../src/wire/safetensors/dtypes.ts'
import { encodeHeader, encodeSafetensors } from '../../../src/wire/safetensors/encode.ts'

/** Parses a whole file in memory. */
function parse (file: Uint8Array): SafetensorsHeader {
  const length = headerLength(file.subarray(0, 8), file.length, 'f')
  return parseHeader(file.subarray(8, 8 + length), file.length, 'f')
}

/** A file with this text for a header and so many bytes of data. */
function file (json: string | Buffer, dataBytes = 0): Buffer {
  const text = Buffer.from(json as string)
  const prefix = Buffer.alloc(8)
  prefix.writeBigUInt64LE(BigInt(text.length))
  return Buffer.concat([prefix, text, Buffer.alloc(dataBytes)])
}

const entry = (dtype: string, shape: string, offsets: string): string =>
  `{"dtype":"${dtype}","shape":${shape},"data_offsets":${offsets}}`

const tensor = fc.record({
  name: fc.string({ unit: 'grapheme', minLength: 1, maxLength: 30 }).filter(name =>
    name !== '__metadata__' && !name.includes('\0')
  ),
  dtype: fc.constantFrom('BF16', 'F16', 'F32', 'I64', 'U8', 'F8_E4M3', 'BOOL'),
  shape: fc.array(fc.nat(5), { maxLength: 4 })
})
const tensors = fc.uniqueArray(tensor, { selector: ({ name }) => name, maxLength: 20 })
const fill = (
  list: Array<{ name: string, dtype: string, shape: number[] }>
): Array<{ name: string, dtype: string, shape: number[], data: Buffer }> =>
  list.map(item => ({
    ...item,
    data: Buffer.alloc(SAFETENSORS_BITS.get(item.dtype)! / 8 * item.shape.reduce((a, b) => a * b, 1), 7)
  }))

t.test('the parser reads the output of the encoder', async t => {
  fc.assert(
    fc.property(tensors, fc.dictionary(fc.string(), fc.string()), (list, metadata) => {
      const bytes = encodeSafetensors(fill(list), metadata)
      const header = parse(bytes)
      t.same(Object.fromEntries(header.metadata), metadata)
      t.equal(header.tensors.length, list.length)
      for (const item of list) {
        t.match(header.tensors.find(found => found.name === item.name), {
          dtype: item.dtype,
          shape: item.shape
        })
      }
      t.equal(bytes.readBigUInt64LE() % 8n, 0n, 'data is aligned')
    }),
    { numRuns: 60 }
  )
})

t.test('tensors are listed in the order of their bytes, whatever the order of the JSON', async t => {
  const { tensors } = parse(
    file(
      `{"z":${entry('U8', '[2]', '[4,6]')},"a":${entry('F32', '[1]', '[0,4]')},"e":${entry('F32', '[0,3]', '[4,4]')}}`,
      6
    )
  )
  t.same(tensors.map(found => found.name), ['a', 'e', 'z'])
  t.same(tensors[0], { name: 'a', dtype: 'F32', shape: [1], begin: tensors[0]!.begin, end: tensors[0]!.begin + 4 })
})

t.test('no tensors, scalars, padding by spaces, unaligned data and four-bit floats are accepted', async t => {
  t.equal(parse(file('{}')).tensors.length, 0)
  t.equal(parse(file('{}      ')).tensors.length, 0)
  t.same(parse(file(`{"__metadata__":{"format":"pt"}, "s" :${entry('BF16', '[]', '[0,2]')}}`, 2)).tensors[0]!.shape, [])
  t.ok(parse(file(`{"s":${entry('F4', '[4]', '[0,2]')}}`, 2)))
})

t.test('every dtype of the format is known by name; three of them are read', async t => {
  t.equal(SAFETENSORS_BITS.size, 22)
  t.same([...SAFETENSORS_BITS.keys()].filter(name => toDType(name) !== undefined), ['BF16', 'F16', 'F32'])
  t.equal(toDType('constructor'), undefined)
})

const one = (fields: string): string => `{"t":{${fields}}}`
const hostile: Array<[string, Buffer, RegExp]> = [
  ['nothing', Buffer.alloc(0), /0 bytes are too few/],
  ['only a length', file(''), /8 bytes are too few/],
  ['text', Buffer.from('version https://git-lfs.github.com/spec/v1\noid sha256:0\n'), /is it a safetensors file\?/],
  [
    'a length of 2^64 - 1',
    Buffer.from('ffffffffffffffff7b7d', 'hex'),
    /a header of 18446744073709551615 bytes \(at most 100000000\)/
  ],
  [
    'a length one above the limit',
    Buffer.from([1, 0xe1, 0xf5, 5, 0, 0, 0, 0, 0x7b, 0x7d]),
    /a header of 100000001 bytes/
  ],
  [
    'a length beyond the file',
    Buffer.from([3, 0, 0, 0, 0, 0, 0, 0, 0x7b, 0x7d]),
    /takes 3 bytes, but the file has 10: it is cut off/
  ],
  ['a length of 1', Buffer.from([1, 0, 0, 0, 0, 0, 0, 0, 0x7b, 0x7d]), /too short for JSON/],
  ['a leading space', file(' {}'), /does not begin with '\{'/],
  ['a list', file('[]'), /does not begin with '\{'/],
  ['a trailing newline', file('{}\n'), /bad header: expected the end/],
  ['a second object', file('{}{}'), /expected the end/],
  ['broken UTF-8', file(Buffer.from([0x7b, 0x22, 0xff, 0x22, 0x3a])), /invalid UTF-8/],
  [
    'a name twice',
    file(`{"t":${entry('U8', '[1]', '[0,1]')},"t":${entry('U8', '[1]', '[1,2]')}}`, 2),
    /the key "t" comes twice/
  ],
  ['metadata twice', file('{"__metadata__":{},"__metadata__":{}}'), /comes twice/],
  ['a metadata key twice', file('{"__metadata__":{"a":"1","a":"1"}}'), /the key "a" comes twice/],
  ['metadata of numbers', file('{"__metadata__":{"a":1}}'), /expected '"', got "1/],
  ['metadata of null', file('{"__metadata__":null}'), /expected '\{'/],
  ['an entry as a list', file('{"t":["F32",[1],[0,4]]}', 4), /expected '\{'/],
  [
    'an unknown field',
    file(one('"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":1'), 1),
    /tensor "t": the unknown field "x"/
  ],
  [
    'a field twice',
    file(one('"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]'), 1),
    /the key "dtype" comes twice/
  ],
  ['no dtype', file(one('"shape":[1],"data_offsets":[0,1]'), 1), /tensor "t": needs dtype, shape and data_offsets/],
  ['an unknown dtype', file(one('"dtype":"F12","shape":[1],"data_offsets":[0,1]'), 1), /the unknown dtype "F12"/],
  ['a dtype of the prototype', file(one('"dtype":"__proto__","shape":[1],"data_offsets":[0,1]'), 1), /unknown dtype/],
  [
    'a float in its shape',
    file(one('"dtype":"U8","shape":[1.0],"data_offsets":[0,1]'), 1),
    /expected an unsigned integer, got "1.0/
  ],
  [
    'a negative size',
    file(one('"dtype":"U8","shape":[-1],"data_offsets":[0,1]'), 1),
    /expected an unsigned integer, got "-1/
  ],
  ['an exponent', file(one('"dtype":"U8","shape":[1e0],"data_offsets":[0,1]'), 1), /expected an unsigned integer/],
  [
    'an offset past 2^53',
    file(one('"dtype":"U8","shape":[1],"data_offsets":[9007199254740992,9007199254740993]'), 1),
    /an integer beyond 2\^53 - 1/
  ],
  [
    'an offset that wraps u64',
    file(one('"dtype":"U8","shape":[1],"data_offsets":[18446744073709551615,0]'), 1),
    /an integer beyond/
  ],
  ['three offsets', file(one('"dtype":"U8","shape":[1],"data_offsets":[0,1,2]'), 1), /a list of more than 2 numbers/],
  ['one offset', file(one('"dtype":"U8","shape":[1],"data_offsets":[0]'), 1), /data_offsets has 1 numbers, not 2/],
  [
    'an end before its begin',
    file(one('"dtype":"U8","shape":[1],"data_offsets":[1,0]'), 1),
    /U8 \[1\] takes 1 bytes, but data_offsets \[1, 0\] hold -1/
  ],
  [
    'a shape that does not fit its offsets',
    file(one('"dtype":"F32","shape":[2,3],"data_offsets":[0,20]'), 20),
    /tensor "t": F32 \[2, 3\] takes 24 bytes, but data_offsets \[0, 20\] hold 20/
  ],
  [
    'a shape whose product wraps',
    file(one('"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]')),
    /is too big/
  ],
  [
    'a shape that wraps before a zero',
    file(one('"dtype":"F32","shape":[9007199254740991,9007199254740991,0],"data_offsets":[0,0]')),
    /is too big/
  ],
  [
    'a thousand dimensions',
    file(one(`"dtype":"U8","shape":[${Array(1000).fill(1).join()}],"data_offsets":[0,1]`), 1),
    /a list of more than 32 numbers/
  ],
  ['half a byte', file(one('"dtype":"F4","shape":[3],"data_offsets":[0,1]'), 1), /does not end on a byte/],
  [
    'a hole at the start',
    file(`{"t":${entry('U8', '[1]', '[1,2]')}}`, 2),
    /tensor "t": begins at 1 of the data and leaves a hole of 1 bytes/
  ],
  [
    'a hole between',
    file(`{"a":${entry('U8', '[1]', '[0,1]')},"b":${entry('U8', '[1]', '[3,4]')}}`, 4),
    /tensor "b": begins at 3 of the data and leaves a hole of 2/
  ],
  [
    'an overlap',
    file(`{"a":${entry('U8', '[4]', '[0,4]')},"b":${entry('U8', '[4]', '[2,6]')}}`, 6),
    /tensor "b": begins at 2 of the data and overlaps its neighbour by 2/
  ],
  [
    'the same bytes twice',
    file(`{"a":${entry('U8', '[4]', '[0,4]')},"b":${entry('U8', '[4]', '[0,4]')}}`, 4),
    /overlaps its neighbour by 4/
  ],
  [
    'bytes at the end that belong to no tensor',
    file(`{"t":${entry('U8', '[1]', '[0,1]')}}`, 2),
    /bytes follow that no tensor owns/
  ],
  ['data cut off', file(`{"t":${entry('U8', '[9]', '[0,9]')}}`, 8), /cut off or still being written/],
  ['an empty name', file(`{"":${entry('U8', '[1]', '[0,1]')}}`, 1), /an empty name/],
  ['NUL in a name', file(`{"a\\u0000":${entry('U8', '[1]', '[0,1]')}}`, 1), /a name with NUL/],
  ['a name of 3,000 letters', file(`{"${'n'.repeat(3000)}":${entry('U8', '[1]', '[0,1]')}}`, 1), /one too long/],
  ['a text that ends early', file('{"t":{"dtype":"U8"'), /expected ',', got the end/],
  ['nesting without end', file('{"t":' + '{"shape":'.repeat(100_000)), /expected '\['/]
]
for (const [what, bytes, message] of hostile) {
  t.test(`a file with ${what} is refused`, async t => {
    t.throws(() => parse(bytes), { name: 'RefitError', code: 'CHECKPOINT_FORMAT', message })
  })
}

t.test('too many tensors are refused before they fill the memory', async t => {
  const entries = Array.from({ length: MAX_TENSORS + 1 }, (_, i) => `"${i}":${entry('U8', '[0]', '[0,0]')}`)
  t.throws(() => parse(file(`{${entries.join(',')}}`)), {
    code: 'CHECKPOINT_FORMAT',
    message: /more than 500000 tensors/
  })
})

t.test('metadata with so many entries that they would block the event loop is refused', async t => {
  const metadata = (count: number): string =>
    `{"__metadata__":{${Array.from({ length: count }, (_, i) => `"${i}":""`).join()}}}`
  t.equal(parse(file(metadata(65_536))).metadata.size, 65_536)
  t.throws(() => parse(file(metadata(65_537))), {
    code: 'CHECKPOINT_FORMAT',
    message: /more than 65536 entries of __metadata__/
  })
})

t.test('100,000 tensors are read exactly', async t => {
  const entries = Array.from(
    { length: 100_000 },
    (_, i) => ({ name: `model.layers.${i}.weight`, dtype: 'BF16', shape: [2, i % 5] })
  )
  const header = encodeHeader(entries)
  const total = entries.reduce((sum, { shape }) => sum + shape[1]! * 4, 0)
  const { tensors } = parseHeader(header.subarray(8), header.length + total, 'f')
  t.equal(tensors.length, 100_000)
  t.equal(tensors.at(-1)!.end, header.length + total)
})

function survives (bytes: Uint8Array): boolean {
  try {
    for (const { begin, end } of parse(bytes).tensors) if (begin > end || end > bytes.length) return false
    return true
  } catch (error) {
    return error instanceof RefitError && error.code === 'CHECKPOINT_FORMAT'
  }
}

t.test('every mutation of a valid file gives a header that fits the file, or a format error', async t => {
  const mutation = fc.record({
    at: fc.nat(400),
    kind: fc.constantFrom('set', 'cut', 'insert', 'double', 'swap'),
    byte: fc.oneof(fc.nat(255), fc.constantFrom(0x22, 0x7b, 0x7d, 0x2c, 0x3a, 0x30, 0x39, 0x5b, 0x5d, 0x5c))
  })
  fc.assert(
    fc.property(
      tensors,
      fc.array(mutation, { minLength: 1, maxLength: 6 }),
      fc.boolean(),
      (list, mutations, fixLength) => {
        let bytes = encodeSafetensors(fill(list.slice(0, 5)), { format: 'pt' })
        const headerEnd = 8 + Number(bytes
          .readBigUInt64LE())
        for (const { at: where, kind, byte } of mutations) {
          const at = where % bytes.length
          if (kind === 'set') bytes[at] = byte
          else if (kind === 'cut') bytes = bytes.subarray(0, at)
          else if (kind === 'insert') {
            bytes = Buffer.concat([
              bytes.subarray(0, at),
              Buffer.from([byte]),
              bytes.subarray(at)
            ])
          } else if (kind === 'double') {
            bytes = Buffer.concat([
              bytes.subarray(0, at),
              bytes.subarray(Math.max(0, at - 20), at),
              bytes.subarray(at)
            ])
          } else bytes[at] = bytes[(at * 7) % bytes.length]!
          if (bytes.length === 0) break
        }
        // In half of the runs the length is corrected, so the damage reaches the JSON.
        if (fixLength && bytes.length >= 10) bytes.writeBigUInt64LE(BigInt(Math.min(headerEnd, bytes.length) - 8))
        return survives(bytes)
      }
    ),
    { numRuns: 4000 }
  )
})

t.test('random bytes and random JSON give no other error', async t => {
  fc.assert(fc.property(fc.uint8Array({ maxLength: 200 }), survives), { numRuns: 2000 })
  fc.assert(fc.property(fc.json(), fc.nat(20), (json, data) => survives(file(json, data))), { numRuns: 2000 })
  const field = fc.oneof(fc.json(), fc.constantFrom('"F32"', '[0,4]', '[1]', '[]', '9007199254740993', '-1', '1e400'))
  const entries = fc.tuple(field, field, field).map(([a, b, c]) =>
    `{"t":{"dtype":${a},"shape":${b},"data_offsets":${c}}}`
  )
  fc.assert(fc.property(entries, fc.nat(8), (json, data) => survives(file(json, data))), { numRuns: 2000 })
})

t.test('a header that is too long is refused before it is allocated', async t => {
  const prefix = Buffer.alloc(8)
  prefix.writeBigUInt64LE(BigInt(MAX_HEADER_BYTES))
  t.throws(() => headerLength(prefix, 1000, 'f'), {
    code: 'CHECKPOINT_FORMAT',
    message: /takes 100000000 bytes, but the file has 1000/
  })
  t.equal(headerLength(prefix, MAX_HEADER_BYTES + 8, 'f'), MAX_HEADER_BYTES)
})

t.test('the encoder refuses tensors that it cannot write exactly', async t => {
  const data = Buffer.alloc(4)
  t.throws(() => encodeSafetensors([{ name: 'a', dtype: 'F32', shape: [2], data }]), {
    code: 'CHECKPOINT_FORMAT',
    message: /takes 8 bytes, got 4/
  })
  t.throws(
    () =>
      encodeSafetensors([{ name: 'a', dtype: 'F32', shape: [1], data }, { name: 'a', dtype: 'F32', shape: [1], data }]),
    { message: /comes twice/ }
  )
  t.throws(() => encodeSafetensors([{ name: '__metadata__', dtype: 'F32', shape: [1], data }]), { message: /reserved/ })
  t.throws(() => encodeHeader([{ name: 'a', dtype: 'F33', shape: [1] }]), { message: /cannot be stored/ })
})
