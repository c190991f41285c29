import { once } from 'node:events'
import Fastify from 'fastify'
import { Readable } from 'node:stream'
import { join } from 'node:path'
import { setTimeout as sleep } from 'node:timers/promises'
import t from 'tap'
import type { CDPSession } from 'playwright-core'
import { servePage } from '../../src/ui/page.ts'
import { engineServer, modelFolder } from '../helpers/gateway.ts'
import { closeBrowser, openPage, post } from './browser.ts'

// Functions that run in the page see these.
declare const document: any

const FRAMES_A_SECOND = 4
/** Ten minutes fill the lines of the charts and the list of updates. */
const WARM = 600 * FRAMES_A_SECOND
const HOUR = 3600 * FRAMES_A_SECOND
const FRAMES_PER_UPDATE = 10

t.teardown(closeBrowser)

/** Frames of a real server: the first one, and one with an update. */
async function record (t: Parameters<typeof modelFolder>[0]): Promise<{ hello: any, state: any }> {
  const folder = modelFolder(t)
  const { url } = await engineServer(t, folder, { ui: true })
  await post(url, '/update_weights_from_disk', { model_path: join(folder, 'adder'), weight_version: 'step-1' })
  const { kind, server, latency_edges: edges, state, updates } = await (await fetch(`${url}/ui/state`)).json() as any
  return { hello: { kind, server, latency_edges: edges, history: [], state, updates }, state: { state, updates } }
}

/** The frames of an hour, one after another; the times move with them. */
function* replay ({ hello, state }: { hello: any, state: any }, mark: (frame: number) => void) {
  const began = Date.now() - 3_600_000
  yield `event: hello\ndata: ${JSON.stringify(hello)}\n\n`
  for (let i = 0; i < HOUR; i++) {
    const at = began + i * 1000 / FRAMES_A_SECOND
    mark(i)
    const frame = structuredClone(state)
    Object.assign(frame.state, {
      at,
      weight_version: `step-${i}`,
      running: i % 7,
      versions: [[`step-${i}`, i % 7], [`step-${i - 1}`, 1]],
      requests: [{ id: `r-${i}`, version: `step-${i}`, versions: 1, tokens: i, seconds: 1, adapter: null }],
      latency: frame.state.latency.map((count: number, bucket: number) => count + (bucket % 5) * i)
    })
    frame.updates = i % FRAMES_PER_UPDATE === 0
      ? [{ ...state.updates[0], id: `u-${i}`, started_at: at / 1000, label_after: `step-${i}` }]
      : []
    yield `event: state\ndata: ${JSON.stringify(frame)}\n\n`
  }
}

async function used (session: CDPSession): Promise<{ heap: number, nodes: number, listeners: number }> {
  // Once a second the page forgets the elements that it has replaced.
  await sleep(2000)
  for (let i = 0; i < 3; i++) await session.send('HeapProfiler.collectGarbage')
  const { usedSize } = await session.send('Runtime.getHeapUsage')
  const { nodes, jsEventListeners } = await session.send('Memory.getDOMCounters')
  return { heap: usedSize, nodes, listeners: jsEventListeners }
}

t.test("an hour's worth of events leaves no memory behind", async t => {
  const frames = await record(t)
  const app = Fastify()
  t.teardown(async () => await app.close())
  servePage(app)
  // The replay waits at two places until the memory has been measured.
  let goOn = (): void => {}
  const held = new Promise<void>(resolve => {
    goOn = resolve
  })
  let sent = 0
  app.get('/ui/events', async (_request, reply) => {
    const all = (async function* () {
      for (
        const frame of replay(frames, i => {
          sent = i
        })
      ) {
        if (sent === WARM) await held
        yield frame
      }
      await once(reply.raw, 'close')
    })()
    return await reply.header('content-type', 'text/event-stream').send(Readable.from(all, { highWaterMark: 8 }))
  })
  const url = await app.listen({ port: 0 })
  const { page, problems } = await openPage(t, url)
  const session = await page.context().newCDPSession(page)
  const shows = async (frame: number): Promise<void> => {
    await page.waitForFunction(step => document.title.startsWith(`step-${step} `), frame, { timeout: 250_000 })
  }
  await shows(WARM - 1)
  const before = await used(session)
  goOn()
  await shows(HOUR - 1)
  const after = await used(session)
  t.comment(JSON.stringify({ before, after }))
  t.ok(after.heap < before.heap + 2e6, `${before.heap} bytes after ten minutes, ${after.heap} after an hour`)
  t.ok(after.nodes < before.nodes + 2000, `${before.nodes} nodes, then ${after.nodes}`)
  t.ok(after.listeners < before.listeners + 200, `${before.listeners} listeners, then ${after.listeners}`)
  t.ok(await page.locator('button.line').count() <= 200)
  t.same(problems, [])
})
