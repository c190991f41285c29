import t from 'tap'
import { readTensorBody } from '../../../src/wire/torch/body.ts'
import type { TensorRequestOptions } from '../../../src/wire/torch/body.ts'
import type { TensorDescriptor } from '../../../src/wire/torch/tensor.ts'
import { assemble, bin, describeBody, global, PROTO4, recordedPickles, str } from '../../helpers/pickles.ts'

const payloads = recordedPickles('payloads')
const one = payloads.find(({ name }) => name === 'one entry for all ranks')!

const read = (
  entries: Array<string | Uint8Array>,
  loadFormat: string | null = null,
  ranks = 1,
  options: TensorRequestOptions = {},
  gpus: string[] = []
): TensorDescriptor[][] => readTensorBody({ entries, loadFormat, ranks, gpus }, options).ranks

t.test('every recorded payload decodes to the description that its sender wrote', async t => {
  t.ok(payloads.length > 50)
  for (const { name, entries, load_format: loadFormat, ranks, gpus, any_dtype: anyDType, expected } of payloads) {
    t.strictSame(describeBody(readTensorBody({ entries, loadFormat, ranks, gpus }, { anyDType })), expected, name)
  }
})

t.test('an invalid payload is refused with the fault, the tensor and the entry', async t => {
  const cases = recordedPickles('refused')
  t.ok(cases.length > 100)
  for (const { name, entries, load_format: loadFormat, ranks, gpus, code, says } of cases) {
    t.throws(() => read(entries, loadFormat, ranks, {}, gpus), {
      name: 'RefitError',
      code,
      message: /^serialized_named_tensors\[\d\]: /
    }, name)
    try {
      read(entries, loadFormat, ranks, {}, gpus)
    } catch (error) {
      const { message, param } = error as { message: string, param?: string }
      t.ok(message.includes(says), `${name}: ${message}`)
      if (message.includes('tensor "w"')) t.equal(param, 'w')
    }
  }
})

t.test('a valid payload that is cut, extended or changed at any byte gives tensors or a RefitError', async t => {
  const codes = new Set<string>()
  for (
    const { entries, load_format: loadFormat, ranks } of payloads.filter(({ entries }) => entries[0]!.length < 1500)
  ) {
    const bytes = Buffer.from(entries[0]!, 'base64')
    for (let at = 0; at < bytes.length; at++) {
      for (const value of [0, 0x28, 0x52, 0x94, 0xff, bytes[at]! ^ 1, bytes[at]! ^ 0x80]) {
        const changed = Buffer.from(bytes)
        changed[at] = value
        try {
          for (const tensors of read([changed], loadFormat, ranks, { anyDType: true })) {
            for (const tensor of tensors) {
              inside(tensor)
            }
          }
        } catch (error) {
          codes.add((error as { code?: string }).code ?? String(error))
        }
      }
    }
  }
  t.same([...codes].sort(), ['PICKLE_LIMIT', 'PICKLE_MALFORMED', 'PICKLE_REFUSED', 'TENSOR_PAYLOAD'])
})

/** Throws an error that is no RefitError if an element lies outside of its storage. */
function inside ({ shape, stride, offset, storage }: TensorDescriptor): void {
  if (shape.includes(0)) return
  const last = shape.reduce((sum, size, axis) => sum + (size - 1) * stride[axis]!, 0)
  if (!Number.isSafeInteger(last) || last < 0 || offset < 0 || offset + last >= storage.bytes) {
    throw new Error(`outside: ${JSON.stringify({ shape, stride, offset, storage })}`)
  }
}

t.test('a body has one entry for all ranks, or at least one per rank', async t => {
  const empty = Buffer.from(']\x94.', 'latin1')
  const none = assemble('\x80\x04', empty).toString('base64')
  const tensors = one.entries[0]!
  const all = read([tensors], null, 3)
  t.equal(all[0], all[2], 'ranks that are sent the same share it')
  const each = read([tensors, none, tensors], null, 3)
  t.equal(each[0], each[2])
  t.same(each[1], [])
  t.equal(
    readTensorBody({ entries: [tensors, none, tensors], loadFormat: null, ranks: 3 }).storages.length,
    1,
    'a storage counts once, however often it is sent'
  )
  t.equal(read([tensors, 'not read'], null, 1).length, 1)
  for (const entries of [[], [tensors, tensors]]) {
    t.throws(() => read(entries, null, 3), {
      code: 'INVALID_REQUEST',
      param: 'serialized_named_tensors',
      message: /one per tensor-parallel rank \(3\), or one for all/
    })
  }
  t.throws(
    () => read([none, 'AAAA', none], null, 3),
    { message: /^serialized_named_tensors\[1\]: / },
    'the entry at fault is named'
  )
})

t.test('an entry is base64, base64 of base64, or the bytes of either', async t => {
  const expected = read(one.entries)
  const pickle = Buffer.from(one.entries[0]!, 'base64')
  const twice = Buffer.from(one.entries[0]!).toString('base64')
  for (const entry of [pickle, new Uint8Array(pickle), twice, Buffer.from(one.entries[0]!), Buffer.from(twice)]) {
    t.same(read([entry]), expected)
  }
  const text = one.entries[0]!
  for (
    const [what, bad] of [
      ['without padding', `${text}A`],
      ['with a line break', `${text.slice(0, 76)}\n${text.slice(76)}`],
      ['of the URL alphabet', `-_${text.slice(2)}`],
      ['with something else', `${text.slice(0, -4)}!!!!`],
      ['padded inside', `AA==${text}`],
      ['with three =', `${text.slice(0, -3)}===`],
      ['beyond ASCII', `\u0100${text.slice(1)}`]
    ] as const
  ) t.throws(() => read([bad]), { code: 'PICKLE_MALFORMED', message: /not base64/ }, what)
  t.throws(() => read(['']), { code: 'PICKLE_MALFORMED', message: /it is empty/ })
  t.throws(() => read([Buffer.from('{"a":1}')]), { code: 'PICKLE_MALFORMED', message: /does not begin with PROTO/ })
})

t.test('a handle in two tensors is one storage, and two handles of one storage are two storages', async t => {
  const { storages, ranks } = readTensorBody({
    ...payloads.find(({ name }) => name === 'views of one share')!,
    loadFormat: null
  })
  t.equal(storages.length, 1)
  t.equal(new Set(ranks[0]!.map(({ storage }) => storage)).size, 2, 'one, and the empty one')
  const devices = readTensorBody({ ...payloads.find(({ name }) => name.startsWith('SGLang'))!, loadFormat: null })
  t.equal(devices.storages.length, 5)
  const handles = devices.storages.map(storage => storage.kind === 'cuda' ? storage.handle : undefined)
  t.equal(
    new Set(handles).size,
    2,
    'segments differ by device and bytes: four spellings of one GPU, and another GPU'
  )
})

t.test('dtypes that weights do not have are accepted only for custom loaders', async t => {
  const { entries } = payloads.find(({ any_dtype: any }) => any)!
  t.throws(() => read(entries), {
    code: 'TENSOR_PAYLOAD',
    message: /dtype float64 is not one of weights; refit takes bfloat16, float16 and float32/
  })
  t.equal(read(entries, 'verl.apply_delta', 1, { anyDType: true })[0]!.length, 10)
})

t.test('handles of a newer torch are accepted on request', async t => {
  const { entries } = recordedPickles('refused').find(({ name }) =>
    name === 'a handle of a future version of cudaMalloc'
  )!
  t.throws(() => read(entries), { message: /version 4/ })
  t.match(read(entries, null, 1, { newerHandles: true })[0]![0]!.storage, {
    kind: 'cuda',
    handle: { type: 'device', version: 4 }
  })
})

t.test('the test vectors of the specification are read', async t => {
  const v1 = '80049550010000000000008c20746f7263682e6d756c746970726f63657373696e672e726564756374696f6e73948c137265' +
    '6275696c645f637564615f74656e736f72949394288c05746f726368948c0654656e736f7294939468038c0453697a659493' +
    '944b044b088694859452944b084b0186944b008c0d746f7263682e73746f72616765948c0c547970656453746f7261676594' +
    '93948c05746f726368948c0862666c6f617431369493944b0043420263000102030405060708090a0b0c0d0e0f1011121314' +
    '15161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f944a000020004d' +
    '00028943102f746f7263685f3132335f3435365f30944b114340404142434445464748494a4b4c4d4e4f5051525354555657' +
    '58595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f9488749452942e'
  const tensor = Buffer.from(v1, 'hex')
  const bare = Buffer.from(tensor)
  bare[bare.length - 3] = 0x86
  const local = assemble(
    PROTO4,
    ']',
    str('w'),
    global('sglang.any', 'LocalSerializedTensor'),
    ')\x81}',
    str('values'),
    ']',
    bin(tensor),
    'asb\x86',
    'a.'
  )
  const bareLocal = assemble(
    PROTO4,
    ']',
    str('w'),
    global('sglang.any', 'LocalSerializedTensor'),
    ')\x81}',
    str('values'),
    ']',
    bin(bare),
    'asb\x86',
    'a.'
  )
  for (const entry of [local, bareLocal]) {
    t.strictSame(describeBody(readTensorBody({ entries: [entry], loadFormat: null, ranks: 1 })), {
      ranks: [[{ name: 'w', dtype: 'bfloat16', shape: [4, 8], stride: [8, 1], offset: 0, storage: 0 }]],
      storages: [{
        kind: 'cuda',
        device: 0,
        handle: {
          type: 'device',
          version: 2,
          blob: Buffer.from(Array.from({ length: 64 }, (_, i) => i)).toString('hex')
        },
        offset: 512,
        bytes: 2097152,
        counterFile: '/torch_123_456_0',
        counterSlot: 17,
        event: Buffer.from(Array.from({ length: 64 }, (_, i) => 64 + i)).toString('hex')
      }],
      spares: []
    })
  }
})

t.test('a big pickle under many names is read once, and tensors are counted before they are allocated', async t => {
  const inner = assemble('\x80\x04', ']N\x85a'.repeat(1000), '0'.repeat(999), '.')
  const names = Buffer.concat(Array.from({ length: 20_000 }, (_, i) => assemble(str(`n${i}`), 'h\x00\x86')))
  const local = assemble(global('x', 'LocalSerializedTensor'), ')\x81}', str('values'), ']', bin(inner), 'asb\x940')
  t.throws(() => read([assemble(PROTO4, local, '](', names, 'e.')]), {
    code: 'TENSOR_PAYLOAD',
    message: /tensor "n0": a list of 1 where a tensor/
  })
  const refs = assemble(PROTO4, 'N\x940](', 'h\x00'.repeat(500_001), 'e.')
  t.throws(() => read([refs]), { code: 'TENSOR_PAYLOAD', message: /500001 tensors \(at most 500000\)/ })
})
