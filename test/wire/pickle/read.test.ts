import t from 'tap'
import type { PickleLimits } from '../../../src/native/pickle.ts'
import { readPickle } from '../../../src/wire/pickle/read.ts'
import {
  PickleBytes,
  PickleDict,
  PickleFloat,
  PickleList,
  PickleName,
  PickleObject,
  PickleSet
} from '../../../src/wire/pickle/values.ts'
import type { PickleValue } from '../../../src/wire/pickle/values.ts'
import { torchNames } from '../../../src/wire/torch/names.ts'
import { assemble, bin, global, PROTO4, recordedPickles, str, u32, u64 } from '../../helpers/pickles.ts'

const read = (...parts: Array<string | number | Uint8Array>): PickleValue =>
  readPickle(assemble(PROTO4, ...parts), torchNames)

/** The form in which Python recorded what it pickled. */
function tagged (value: PickleValue): unknown {
  if (value === null || typeof value === 'boolean') return value
  if (typeof value === 'number' || typeof value === 'bigint') return { int: String(value) }
  if (typeof value === 'string') return { str: value }
  if (Array.isArray(value)) return { tuple: value.map(tagged) }
  if (value instanceof PickleList) return { list: value.items.map(tagged) }
  if (value instanceof PickleDict) return { dict: value.keys.map((key, i) => [tagged(key), tagged(value.values[i]!)]) }
  if (value instanceof PickleBytes) return { bytes: value.view().toString('hex') }
  if (value instanceof PickleSet) {
    return { set: value.items.map(tagged).sort((a, b) => JSON.stringify(a) < JSON.stringify(b) ? -1 : 1) }
  }
  if (value instanceof PickleFloat) {
    const bytes = Buffer.alloc(8)
    bytes.writeDoubleBE(value.value)
    return { float: bytes.toString('hex') }
  }
  throw new Error('a record where plain data was expected')
}

t.test('plain data reads as Python wrote it, in every protocol', async t => {
  const cases = recordedPickles('values')
  t.ok(cases.length > 40)
  for (const { name, pickle, value } of cases) {
    t.same(tagged(readPickle(Buffer.from(pickle, 'base64'), torchNames)), value, name)
  }
})

t.test('every pickle that is cut off anywhere is malformed, and so is one with a byte after it', async t => {
  const cases = recordedPickles('values').map(({ pickle }) => Buffer.from(pickle, 'base64')).filter(bytes =>
    bytes.length < 3000
  )
  cases.push(
    ...recordedPickles('payloads').slice(0, 30).map(({ entries }) => Buffer.from(entries[0]!, 'base64')).filter(bytes =>
      bytes.length < 3000
    )
  )
  t.ok(cases.length > 20)
  for (const bytes of cases) {
    for (let end = 0; end < bytes.length; end++) {
      try {
        readPickle(bytes.subarray(0, end), torchNames)
        t.fail(`taken at ${end} of ${bytes.length}`)
      } catch (error) {
        if ((error as { code?: string }).code !== 'PICKLE_MALFORMED') throw error
      }
    }
    t.throws(() => readPickle(Buffer.concat([bytes, Buffer.from('.')]), torchNames), {
      code: 'PICKLE_MALFORMED',
      message: /1 bytes follow its end/
    })
  }
})

t.test('pickles that run code in Python are refused, with every trick around it', async t => {
  const cases = recordedPickles('exploits')
  t.ok(cases.length > 300)
  for (const { name, pickle, refused } of cases) {
    t.throws(() => readPickle(Buffer.from(pickle, 'base64'), torchNames), {
      name: 'RefitError',
      code: refused,
      message: /^(bad|refused) pickle at byte \d+: /
    }, name)
  }
})

t.test('a refusal has the name or opcode, its position, and advice if there is some', async t => {
  t.throws(() => read(global('os', 'system'), str('x'), '\x85R.'), {
    code: 'PICKLE_REFUSED',
    message: 'refused pickle at byte 14: "os.system" is not a name that refit knows'
  })
  t.throws(() => readPickle(assemble('\x80\x02cos\nsystem\n.'), torchNames), {
    message: 'refused pickle at byte 2: "os.system" is not a name that refit knows'
  })
  t.throws(() => read(']P1\n.'), {
    message: /^refused pickle at byte 3: opcode 50 \(PERSID\) is not read: a persistent id/
  })
  t.throws(() => read('\xfe.'), { message: 'refused pickle at byte 2: fe is no opcode of pickle' })
  t.throws(() => read(global('torch._tensor', '_rebuild_from_type_v2'), '.'), { message: /full_tensor\(\)/ })
  t.throws(() => read(global('torch.distributed.tensor', 'DTensor'), '.'), { message: /full_tensor\(\)/ })
  t.throws(() => read(global('torch.distributed._shard.sharded_tensor.api', 'ShardedTensor'), '.'), {
    message: /full state dict/
  })
  t.throws(() => read(global('peft.tuners.lora.config', 'LoraConfig'), '.'), { message: /goes into config_dict of/ })
  t.throws(
    () => read(global('x'.repeat(250), 'y"\n'), '.'),
    { message: /y\\"\\n" is not a name/ },
    'names are quoted and cut'
  )
})

t.test('a name and a call become records, with their arguments in order', async t => {
  const known = read(
    global('torch.multiprocessing.reductions', 'rebuild_tensor'),
    '\x94h\x00K\x01K\x02\x86R\x86.'
  ) as PickleValue[]
  t.ok(known[0] instanceof PickleName)
  t.equal((known[0] as PickleName).role, 'rebuild_tensor')
  const call = known[1] as PickleObject
  t.ok(call instanceof PickleObject)
  t.equal(call.name, known[0])
  t.same(call.args, [1, 2])
  const instance = read(
    global('anywhere.at.all', 'FlattenedTensorMetadata'),
    ')\x81}',
    str('name'),
    str('w'),
    'sb.'
  ) as PickleObject
  t.equal(instance.state?.get('name'), 'w')
  t.equal(instance.state?.get('shape'), undefined)
})

t.test('bytes are views of the input', async t => {
  const input = assemble(PROTO4, 'C\x03abc.')
  const value = readPickle(input, torchNames) as PickleBytes
  input[5] = 0x7a
  t.equal(value.latin1(), 'azc')
  t.equal(value.view().buffer, input.buffer)
  const offset = assemble('....', input).subarray(4)
  t.equal((readPickle(offset, torchNames) as PickleBytes).latin1(), 'azc', 'of a part of a buffer too')
})

t.test('frames are checked, and long bytes may lie between them', async t => {
  const framed = (length: bigint, ...body: Array<string | Uint8Array>): Buffer =>
    assemble(PROTO4, '\x95', u64(length), ...body)
  t.equal(readPickle(framed(2n, 'K\x07.').subarray(0), torchNames), 7, 'the last opcode may lie behind it')
  t.equal(readPickle(framed(3n, 'K\x07.'), torchNames), 7)
  const big = Buffer.alloc(70_000, 1)
  const outside = readPickle(framed(2n, ']\x94', bin(big), '\x95', u64(2n), 'a.'), torchNames) as PickleList
  t.equal((outside.items[0] as PickleBytes).length, 70_000, 'long bytes lie between frames')
  for (
    const [what, bytes] of [
      ['longer than the rest', framed(4n, 'K\x07.')],
      ['of 2^63 bytes', framed(1n << 63n, 'K\x07.')],
      ['inside another', framed(12n, '\x95', u64(3n), 'K\x07.')]
    ] as const
  ) t.throws(() => readPickle(bytes, torchNames), { code: 'PICKLE_MALFORMED' }, what)
})

t.test('opcodes in an order that no pickler writes are malformed', async t => {
  for (
    const [what, ...parts] of [
      ['a second PROTO', '\x80\x04N.'],
      ['nothing on the stack', '.'],
      ['two values on the stack', 'NN.'],
      ['an open MARK', 'N(.'],
      ['an open MARK under the value', '(N.'],
      ['a tuple without MARK', 'NNt.'],
      ['a tuple of more than there is', 'N\x86.'],
      ['a tuple that takes what lies below a MARK', 'NN(N\x86.'],
      ['REDUCE across a MARK', 'N(R.'],
      ['a memo that was not set', 'h\x00.'],
      ['a long memo that was not set', 'j', u32(7), '.'],
      ['a memo of a number out of line', 'Nq\x05.'],
      ['a memo of 2^32 - 1', 'Nr', u32(0xffffffff), '.'],
      ['a memo of nothing', '\x94N.'],
      ['a memo of what lies below a MARK', 'N(\x940.'],
      ['APPEND to a tuple', ')Na.'],
      ['APPENDS to a dict', '}(NNe.'],
      ['APPENDS without MARK', ']NNe.'],
      ['SETITEM on a list', ']NNs.'],
      ['SETITEMS with an odd number', '}(NNNu.'],
      ['SETITEMS below its MARK', '(}NNu.'],
      ['ADDITEMS to a list', '](N\x90.'],
      ['POP of nothing', '0.'],
      ['POP_MARK without MARK', 'N1.'],
      ['STACK_GLOBAL with one string', str('os'), '\x93.'],
      ['text that is not UTF-8', '\x8c\x02\xc3\x28.'],
      ['half a surrogate pair, as surrogatepass writes it', '\x8c\x03\xed\xa0\x80.'],
      ['text longer than the pickle', 'X', u32(100), 'abc.'],
      ['text of 2^64 - 1 bytes', '\x8d', u64(0xffffffffffffffffn), 'abc.'],
      ['bytes longer than the pickle', '\x8e', u64(1n << 40n), 'abc.'],
      ['a name without its line', 'ctorch\nTensor'],
      ['a name that is too long', `c${'x'.repeat(300)}\nTensor\n.`],
      ['REDUCE without a tuple', global('torch', 'Size'), 'NR.'],
      ['bytes as text past latin1', global('_codecs', 'encode'), str('\u0100'), str('latin1'), '\x86R.']
    ] as const
  ) {
    t.throws(
      () => read(...parts),
      { name: 'RefitError', code: /PICKLE_(MALFORMED|LIMIT)/, message: /at byte \d+: / },
      what
    )
  }
  for (
    const [what, bytes] of [['empty', ''], ['of one byte', '\x80'], ['text', 'gASV'], ['of protocol 0', '(lp0\n.'], [
      'of protocol 1',
      '\x80\x01].'
    ], ['of protocol 6', '\x80\x06].']] as const
  ) {
    t.throws(() => readPickle(assemble(bytes), torchNames), { code: 'PICKLE_MALFORMED' }, what)
  }
})

t.test('POP removes a MARK, and popped values are dropped', async t => {
  t.equal(read('K\x01K\x020.'), 1)
  t.equal(read('K\x01(0.'), 1)
  t.equal(read('K\x01(K\x02K\x031.'), 1)
  t.same(read('((K\x01t0K\x02t.'), [2])
})

t.test('each limit holds, to the value', async t => {
  const cases: Array<[limit: keyof PickleLimits, at: number, pickle: Buffer]> = [
    ['bytes', 4, assemble(PROTO4, 'N.')],
    ['memo', 3, assemble(PROTO4, 'N\x94\x94\x94.')],
    ['objects', 4, assemble(PROTO4, '](]]}e.')],
    ['items', 3, assemble(PROTO4, ']N\x85aNa.')],
    ['stack', 5, assemble(PROTO4, '(NNNNNt.')],
    ['depth', 3, assemble(PROTO4, '(((ttt.')],
    ['text', 5, assemble(PROTO4, str('abcde'), '.')]
  ]
  for (const [limit, at, pickle] of cases) {
    t.doesNotThrow(() => readPickle(pickle, torchNames, { [limit]: at }), limit)
    t.throws(
      () => readPickle(pickle, torchNames, { [limit]: at - 1 }),
      { code: 'PICKLE_LIMIT' },
      `${limit} less one`
    )
  }
  t.throws(() => read('\x8a\x21', Buffer.alloc(33, 1), '.'), { code: 'PICKLE_LIMIT' }, 'an int of 33 bytes')
  t.equal(read('\x8a\x20', Buffer.alloc(31), 1, '.'), 1n << 248n, 'an int of 32')
})

t.test('a pickle of a few bytes cannot allocate much memory', async t => {
  const text = 'x'.repeat(200)
  const encodes = Buffer.concat(Array.from({ length: 100 }, () => assemble('h\x00h\x01h\x02\x86R0')))
  t.throws(
    () => read(global('_codecs', 'encode'), '\x940', str(text), '\x940', str('latin1'), '\x940', encodes, 'N.'),
    { code: 'PICKLE_LIMIT' },
    'one text encoded again and again'
  )
  const lists = assemble(PROTO4, ']'.repeat(2 ** 21 + 1), '.')
  t.throws(() => readPickle(lists, torchNames), { code: 'PICKLE_LIMIT' }, 'lists and nothing else')
  const tuples = assemble(PROTO4, ')', '\x85'.repeat(2 ** 21 + 1), '.')
  t.throws(() => readPickle(tuples, torchNames), { code: 'PICKLE_LIMIT' }, 'a tuple in a tuple in a tuple')
  t.doesNotThrow(
    () => readPickle(assemble(PROTO4, ')', '\x85'.repeat(1_000_000), '.'), torchNames),
    'nesting needs no stack of ours'
  )
  const doubled = Array.from({ length: 60 }, (_, i) => assemble('0h', i, 'h', i, '\x86\x94'))
  const twins = read(')\x94', ...doubled, '.') as PickleValue[]
  t.equal(twins[0], twins[1], 'a tuple of 2^60 leaves is 60 tuples')
})

t.test('values that contain themselves are read', async t => {
  const list = read(']\x94h\x00a.') as PickleList
  t.equal(list.items[0], list)
  const dict = read('}\x94K\x01h\x00s.') as PickleDict
  t.equal(dict.values[0], dict)
})

t.test('names of Object.prototype are not in the set of allowed names', async t => {
  for (const name of ['constructor', '__proto__', 'toString', 'hasOwnProperty', 'valueOf', '']) {
    t.equal(torchNames(name, name), undefined)
    t.equal(torchNames('torch', name), undefined)
    t.equal(torchNames(name, 'Tensor'), undefined)
  }
  t.equal(torchNames('os; import', '_rebuild_cuda_tensor_modified'), undefined)
  t.ok(torchNames('a.b', '_rebuild_cuda_tensor_modified') instanceof PickleName)
})

t.test('a name behind a persistent id is the name that the pickle has there', async t => {
  const load = new PickleName('pickle', 'persistent_load', 'call', 'storage')
  const names = [load, new PickleName('m', 'first', 'any', 'any'), new PickleName('m', 'second', 'any', 'any')]
  const find = (module: string, name: string): PickleName | undefined =>
    names.find(known => known.module === module && known.name === name)
  // BINPERSID of a tuple with the first name, then the second name, as torch.save writes two storages.
  const pickle = assemble(PROTO4, 'cm\nfirst\n', '\x85', 'Q', 'cm\nsecond\n', '\x86', '.')
  const [id, second] = readPickle(pickle, find) as PickleValue[]
  t.same([(id as PickleObject).name, (id as PickleObject).args], [load, [[names[1]]]])
  t.equal(second, names[2])
})
