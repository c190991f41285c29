import t from 'tap'
import { hermes } from '../../../src/text/tools/hermes.ts'
import { ToolParser } from '../../../src/text/tools/tool-parser.ts'

t.test('a reply of many malformed blocks is searched a bounded number of times, and stays whole', async t => {
  let reads = 0
  const format = {
    ...hermes,
    read: (...args: Parameters<typeof hermes.read>) => {
      reads++
      return hermes.read(...args)
    }
  }
  const text = '<tool_call>\n{"name": "a", "arguments": {"b": ['.repeat(2000)
  for (const cut of [text.length, 1000]) {
    reads = 0
    const parser = new ToolParser(format, [])
    const pieces = []
    for (let at = 0; at < text.length; at += cut) pieces.push(...parser.push(text.slice(at, at + cut)))
    pieces.push(...parser.finish())
    t.equal(pieces.join(''), text)
    t.ok(reads <= 64, `${reads} reads`)
  }
})
