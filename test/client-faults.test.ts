import t from 'tap'
import { RefitClient } from '../src/client/client.ts'
import { scriptedEngine } from './helpers/scripted-engine.ts'

t.test('a stream that breaks off, or ends without its end mark, is an error', async t => {
  const engine = await scriptedEngine(t)
  const client = new RefitClient(engine.url)
  t.teardown(async () => {
    await client.close()
  })
  for (
    const [name, end] of [['ends', (response: any) => response.end()], [
      'breaks off',
      (response: any) => response.socket.destroy()
    ]] as const
  ) {
    engine.on['/generate'] = (_request, response) => {
      response.writeHead(200, { 'content-type': 'text/event-stream' }).write(
        'data: {"text":"begun","meta_info":{"finish_reason":null}}\n\n'
      )
      setTimeout(() => {
        end(response)
      }, 50)
    }
    const seen: unknown[] = []
    await t.rejects(
      (async () => {
        for await (const { text } of client.stream({ text: 'x' })) seen.push(text)
      })(),
      { name: 'ClientError', status: 0, message: /broke off/ },
      name
    )
    t.same(seen, ['begun'])
  }
})
