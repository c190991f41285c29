import t from 'tap'
import { byteForm } from '../../src/text/byte-form.ts'

const replace = { type: 'Replace', pattern: { String: '▁' }, content: ' ' }
const fallback = { type: 'ByteFallback' }
const fuse = { type: 'Fuse' }
const sequence = (...decoders: unknown[]) => ({ type: 'Sequence', decoders })
const strip = (start: number, stop: number) => ({ type: 'Strip', content: ' ', start, stop })

t.test('decoders that do not map each token to bytes have no byte form', async t => {
  for (
    const decoder of [
      undefined,
      null,
      'ByteLevel',
      {},
      { type: 'WordPiece', prefix: '##' },
      { type: 'Sequence' },
      sequence(),
      sequence(null),
      sequence(fuse),
      sequence(strip(1, 0)),
      sequence(replace, strip(1, 0)),
      sequence(replace, fuse, strip(0, 1)),
      sequence(fallback, replace),
      sequence({ type: 'Replace', pattern: { Regex: 'a+' }, content: ' ' }, fuse),
      sequence({ type: 'Replace', pattern: { String: '' }, content: ' ' }, fuse),
      sequence(replace, { type: 'ByteLevel' }),
      sequence(replace, fuse, fuse)
    ]
  ) t.equal(byteForm(decoder), null, JSON.stringify(decoder))
})

t.test('the decoders of current models have a byte form, also nested', async t => {
  t.same(byteForm({ type: 'ByteLevel' })?.strip, null)
  t.ok(byteForm(sequence({ type: 'ByteLevel' })))
  t.same(byteForm(sequence(replace, fallback, fuse))?.strip, null)
  t.same(byteForm(sequence(sequence(replace, fallback), sequence(fuse, strip(1, 0))))?.strip, {
    content: ' ',
    count: 1
  })
  t.same(byteForm({ type: 'Metaspace', replacement: '_', prepend_scheme: 'never' })?.strip, null)
  t.same(byteForm({ type: 'Metaspace', replacement: '_', add_prefix_space: false })?.strip, null)
})

t.test('a byte token is decoded to its byte only if it is spelt exactly', async t => {
  const { bytesOf } = byteForm(sequence(replace, fallback, fuse))!
  t.same([...bytesOf('<0xe2>', false)], [0xe2])
  t.same([...bytesOf('<0xE2>', false)], [0xe2])
  for (const text of ['<0xE>', '<0xE2', ' <0xE2>', '<0xEG>', '<0xE2>\n']) t.equal(bytesOf(text, false).toString(), text)
  t.equal(bytesOf('▁a▁', false).toString(), ' a ')
  t.equal(byteForm(sequence(replace))!.bytesOf('<0xE2>', false).toString(), '<0xE2>')
})

t.test('a replacement is inserted as it is written, dollar signs too', async t => {
  const { bytesOf } = byteForm(sequence({ type: 'Replace', pattern: { String: '.' }, content: '$&$1' }))!
  t.equal(bytesOf('a.b.', false).toString(), 'a$&$1b$&$1')
})

t.test('byte-level tokens are decoded to bytes, added tokens to text', async t => {
  const { bytesOf } = byteForm({ type: 'ByteLevel' })!
  t.same([...bytesOf('Ġa', false)], [0x20, 0x61])
  t.same([...bytesOf('Ã©', false)], [0xc3, 0xa9])
  t.same([...bytesOf('\u0143', false)], [0xad])
  t.equal(bytesOf('é', true).toString(), 'é')
  t.equal(bytesOf('工具', false).toString(), '工具', 'a character outside the alphabet')
})
