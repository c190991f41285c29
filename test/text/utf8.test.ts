import fc from 'fast-check'
import t from 'tap'
import { completeLength } from '../../src/text/utf8.ts'

const decode = (bytes: Uint8Array) => new TextDecoder('utf-8', { ignoreBOM: true }).decode(bytes)

t.test('cutting at complete characters never changes the decoded text', async t => {
  // Lead and continuation bytes are frequent, because the limits of valid UTF-8 lie between them.
  const byte = fc.oneof(
    fc.integer({ min: 0, max: 255 }),
    fc.constantFrom(0x80, 0xbf, 0xc2, 0xe0, 0xe2, 0xed, 0xef, 0xf0, 0xf4, 0xf5, 0x9f, 0xa0, 0x8f, 0x90)
  )
  fc.assert(
    fc.property(fc.array(byte, { maxLength: 12 }), fc.array(byte, { maxLength: 4 }), (first, second) => {
      const all = Uint8Array.from([...first, ...second])
      const cut = completeLength(Uint8Array.from(first))
      return first.length - cut <= 3 && decode(all.subarray(0, cut)) + decode(all.subarray(cut)) === decode(all)
    }),
    { numRuns: 20_000 }
  )
})

t.test('whole characters are returned at once, and incomplete ones are held back', async t => {
  fc.assert(
    fc.property(fc.string({ unit: 'binary', minLength: 1, maxLength: 6 }), text => {
      const bytes = Buffer.from(text, 'utf8')
      if (completeLength(bytes) !== bytes.length) return false
      const last = Buffer.byteLength([...text].at(-1)!)
      for (let missing = 1; missing < last; missing++) {
        if (completeLength(bytes.subarray(0, bytes.length - missing)) !== bytes.length - last) return false
      }
      return true
    }),
    { numRuns: 5000 }
  )
  t.equal(completeLength(new Uint8Array(0)), 0)
})
