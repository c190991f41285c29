import t from 'tap'
import { sseData } from '../src/client/sse-reader.ts'

async function read (chunks: string[], longest?: number): Promise<{ data: string[], ended: boolean }> {
  const events = sseData(
    (async function* () {
      for (const chunk of chunks) yield Buffer.from(chunk)
    })(),
    longest
  )
  const data: string[] = []
  for (;;) {
    const { done, value } = await events.next()
    if (done === true) return { data, ended: value }
    data.push(value)
  }
}

t.test('events are read wherever the stream is cut', async t => {
  const text = ': comment\ndata: {"a": 1}\n\nevent: x\ndata:é2\n\ndata: [DONE]\n\n'
  for (let size = 1; size <= text.length; size++) {
    const chunks = Array.from({ length: Math.ceil(text.length / size) }, (_, i) => text.slice(i * size, (i + 1) * size))
    t.strictSame(await read(chunks), { data: ['{"a": 1}', 'é2'], ended: true })
  }
  t.strictSame(await read(['data: 1\n', 'data: 2']), { data: ['1'], ended: false })
})

t.test('an event without end breaks off', async t => {
  await t.rejects(read(['data: ', ...Array<string>(20).fill('x'.repeat(10))], 100), /longer than 100 characters/)
  t.strictSame(await read(Array<string>(50).fill('data: 123\n\n'), 100), { data: Array(50).fill('123'), ended: false })
})
