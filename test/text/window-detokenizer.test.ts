import { join } from 'node:path'
import fc from 'fast-check'
import t from 'tap'
import { packageRoot } from '../../src/root.ts'
import { loadTokenizer } from '../../src/text/tokenizer.ts'
import { WindowDetokenizer } from '../../src/text/window-detokenizer.ts'

const qwen = (await loadTokenizer(join(packageRoot, 'test/fixtures/text/qwen-like')))!

t.test('a sliding window gives the text of all ids for any text', async t => {
  fc.assert(
    fc.property(fc.string({ unit: 'binary', maxLength: 40 }), text => {
      const ids = qwen.encode(text, { addSpecialTokens: false })
      const detokenizer = new WindowDetokenizer(ids => qwen.decode(ids), () => true)
      return ids.map(id => detokenizer.push([id])).join('') + detokenizer.flush() === qwen.decode(ids)
    }),
    { numRuns: 2000 }
  )
})

t.test('decoding takes linear time, also if every id is a broken character or has no text', async t => {
  const broken = qwen.encode('🦑', { addSpecialTokens: false }).slice(0, 1)
  const unknown = [qwen.vocabSize + 7]
  for (const [name, unit] of [['text', qwen.encode('word')], ['broken', broken], ['unknown', unknown]] as const) {
    let decoded = 0
    const detokenizer = new WindowDetokenizer(ids => {
      decoded += ids.length
      return qwen.decode(ids)
    }, id => id < qwen.vocabSize)
    const count = 3000
    for (let i = 0; i < count; i++) detokenizer.push(unit)
    detokenizer.flush()
    t.ok(decoded <= count * unit.length * 40, `${name}: ${decoded} ids decoded for ${count * unit.length}`)
  }
})
