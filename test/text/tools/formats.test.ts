import t from 'tap'
import { TOOL_FORMATS, toolFormat } from '../../../src/text/tools/tool-formats.ts'
import { cuts, parsePieces } from './calls.ts'
import { CASES } from './cases.ts'

for (const [name, cases] of Object.entries(CASES)) {
  t.test(`${name}: calls and text are told apart, and no text is lost`, async t => {
    for (const [text, content, ...calls] of cases) {
      const { ids: _, ...parsed } = parsePieces(name, [text])
      t.same(parsed, { content, calls }, text)
    }
  })

  t.test(`${name}: a stream has the same calls and text as the whole, wherever it is cut`, async t => {
    for (const [text] of cases) {
      const whole = parsePieces(name, [text])
      const other = cuts(text).find(pieces => JSON.stringify(parsePieces(name, pieces)) !== JSON.stringify(whole))
      t.equal(other, undefined, text)
    }
  })

  t.test(`${name}: every beginning of a reply keeps its text, and cuts do not matter`, async t => {
    for (const [text] of cases) {
      for (let length = 0; length <= text.length; length += 3) {
        const begun = text.slice(0, length)
        const whole = parsePieces(name, [begun])
        const streamed = parsePieces(name, [...begun])
        if (JSON.stringify(streamed) !== JSON.stringify(whole)) t.same(streamed, whole, begun)
        if (whole.calls.length === 0 && whole.content !== begun) t.equal(whole.content, begun)
      }
    }
  })
}

t.test('every format has cases, under one of its names', async t => {
  const tested = new Set(Object.keys(CASES).map(toolFormat))
  t.same([...TOOL_FORMATS].filter(([, format]) => !tested.has(format)), [])
})

t.test('an unknown name is refused with the known ones', async t => {
  t.throws(() => toolFormat('qwen4'), {
    code: 'CONFIG',
    message: /^--tool-call-parser: expected qwen, .*; got "qwen4"$/
  })
})

t.test('text arrives as soon as it can be no marker', async t => {
  const { ToolParser } = await import('../../../src/text/tools/tool-parser.ts')
  const parser = new ToolParser(toolFormat('hermes'), [])
  t.same(parser.push('Hello <too'), ['Hello'])
  t.same(parser.push('l box>'), [' <tool box>'])
  t.same(parser.push('\n<tool_call>{"name": "now"}'), [])
  t.same(parser.push('</tool_call>'), [{ name: 'now', arguments: '{}', id: null }])
})

t.test("Kimi's and Mistral's calls keep the ids that the model wrote", async t => {
  t.same(parsePieces('kimi_k2', [CASES['kimi_k2']![0]![0]]).ids, ['functions.get_weather:0', 'now:13'])
  t.same(parsePieces('mistral', [CASES['mistral']![1]![0]]).ids, [null, 'a1B2c3D4e'])
  t.match(toolFormat('mistral').newId!(), /^[a-zA-Z0-9]{9}$/)
})

t.test('a long reply with many openings takes little time', async t => {
  const text = '<tool_call>{"a": "'.repeat(3000)
  t.equal(parsePieces('hermes', text.match(/.{1,7}/gs)!).content, text)
})
