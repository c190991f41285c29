import { readdirSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import { packageRoot } from '../../../src/root.ts'
import { FakeEngine } from '../../helpers/fake-engine.ts'
import { call, routeApp, until } from '../../helpers/route-app.ts'

const HTML = { headers: { accept: 'text/html,application/xhtml+xml' }, redirect: 'manual' } as const

/** Frames of the event stream, until `enough` of them. */
async function frames (url: string, enough: number, headers: Record<string, string> = {}): Promise<any[]> {
  const control = new AbortController()
  const reply = await fetch(`${url}/ui/events`, { headers, signal: control.signal })
  t.equal(reply.headers.get('content-type'), 'text/event-stream; charset=utf-8')
  let text = ''
  for await (const chunk of reply.body!.pipeThrough(new TextDecoderStream())) {
    text += chunk
    if (text.split('\n\n').length > enough) break
  }
  control.abort()
  return text.split('\n\n').slice(0, enough).map(frame => {
    const [, event, data] = /^event: (\w+)\ndata: (.*)$/.exec(frame)!
    return { event, ...JSON.parse(data!) }
  })
}

t.test('a plugin serves no page unless it is told to', async t => {
  const { url } = await routeApp(t)
  for (const path of ['/ui', '/ui/', '/ui/main.js', '/ui/state', '/ui/events']) {
    t.equal((await call(url + path)).status, 404, path)
  }
  t.equal((await call(url, undefined, HTML)).json, 'refit is running')
})

t.test('the page is whole, and may load nothing from elsewhere', async t => {
  const { url } = await routeApp(t, { ui: true, prefix: '/rollout' })
  const moved = await call(`${url}/ui`, undefined, HTML)
  t.equal(moved.status, 302)
  t.equal(new URL(moved.headers.get('location')!, `${url}/ui`).href, `${url}/ui/`)
  const page = await call(`${url}/ui/`)
  t.equal(page.headers.get('content-type'), 'text/html; charset=utf-8')
  const policy = page.headers.get('content-security-policy')!
  for (const rule of ["default-src 'none'", "script-src 'self'", "style-src 'self'", "frame-ancestors 'none'"]) {
    t.ok(policy.split('; ').includes(rule), rule)
  }
  t.notMatch(policy, /unsafe|https?:|\*/)
  t.notMatch(page.text, /https?:|<script>|<style|\sstyle=|\son\w+=/, 'no inline script or style, no other server')
  const used = [...page.text.matchAll(/(?:src|href)="([^"#]+)"/g)].map(([, path]) => path!)
  t.ok(used.length >= 4)
  for (
    const path of new Set([
      ...used,
      ...readdirSync(join(packageRoot, 'ui')).filter(name => name !== 'index.html')
    ])
  ) {
    const file = await call(`${url}/ui/${path}`)
    t.equal(file.status, 200, path)
    t.equal(file.headers.get('x-content-type-options'), 'nosniff', path)
    for (const [, other] of path.endsWith('.js') ? file.text.matchAll(/from '\.\/([^']+)'/g) : []) {
      t.equal((await call(`${url}/ui/${other}`)).status, 200, `${path} imports ${other}`)
    }
  }
  const etag = page.headers.get('etag')!
  t.equal((await call(`${url}/ui/`, undefined, { headers: { 'if-none-match': etag } })).status, 304)
})

t.test('browsers that open the root go to the page, and programs get the name of the server', async t => {
  for (const prefix of ['', '/rollout']) {
    const { url } = await routeApp(t, { ui: true, ...prefix === '' ? {} : { prefix }, apiKey: 'key' })
    for (const path of ['', '/', '/?a=b']) {
      const reply = await call(url + path, undefined, HTML)
      t.equal(reply.status, 302, path)
      const from = path === '' && prefix === '' ? `${url}/` : url + path
      t.equal(new URL(reply.headers.get('location')!, from).href, `${url}/ui/`, path)
    }
    t.equal((await call(`${url}/`)).status, 401, 'not for a browser')
  }
})

t.test('with a key the page is only a shell: its numbers need the key', async t => {
  const { url } = await routeApp(t, { ui: true, apiKey: 'key', adminApiKey: 'admin' })
  t.equal((await call(`${url}/ui/`)).status, 200)
  for (const path of ['/ui/state', '/ui/events', '/updates']) {
    t.equal((await call(url + path)).status, 401, path)
    t.equal((await call(`${url}${path}?key=key`)).status, 401, path)
  }
  const [hello] = await frames(url, 1, { authorization: 'Bearer key' })
  t.equal(hello.event, 'hello')
})

t.test('without a key, pages of other websites get nothing, and the own page gets all', async t => {
  const { url } = await routeApp(t, { ui: true, allowedHosts: [] })
  const own = new URL(url).origin
  for (const path of ['/ui/', '/ui/main.js', '/ui/state', '/ui/events', '/updates']) {
    for (
      const headers of [{ origin: 'http://evil.example' }, { 'sec-fetch-site': 'cross-site' }] as Record<
        string,
        string
      >[]
    ) {
      t.equal((await call(url + path, undefined, { headers })).status, 403, path)
    }
  }
  t.equal((await call(`${url}/ui/state`, undefined, { headers: { 'sec-fetch-site': 'same-origin' } })).status, 200)
  t.equal((await call(`${url}/ui/state`, undefined, { headers: { origin: own } })).status, 200)
  const sent = await call(`${url}/generate`, undefined, {
    method: 'POST',
    headers: { origin: own, 'sec-fetch-site': 'same-origin', 'content-type': 'application/json' },
    body: JSON.stringify({ input_ids: [5], sampling_params: { max_new_tokens: 1 } })
  })
  t.equal(sent.status, 200)
})

t.test('the stream begins with everything, then tells what changes', async t => {
  const { url } = await routeApp(t, { ui: true })
  await call(`${url}/update_weights_from_disk`, { model_path: '/nowhere' })
  const following = frames(url, 4)
  const [hello, ...states] = await following
  t.match(hello, {
    event: 'hello',
    kind: 'engine',
    server: { model: 'fake', shows_prompts: false },
    state: { status: 'ok', weight_version: 'default', running: 0, kv: { total: 1 << 16 }, groups: [], adapters: null },
    updates: [{ outcome: 'refused' }]
  })
  t.same(hello.state.latency.length, hello.latency_edges.length + 1)
  for (const state of states) t.match(state, { event: 'state', state: { status: 'ok' }, updates: [] })
})

t.test('an update that happens while the page is open comes in the next frame', async t => {
  const { url } = await routeApp(t, { ui: true })
  const following = frames(url, 6)
  await new Promise(resolve => setTimeout(resolve, 300))
  await call(`${url}/update_weights_from_disk`, { model_path: '/nowhere' })
  const updates = (await following).flatMap(({ event, updates }) => event === 'state' ? updates : [])
  t.match(updates.at(-1), { outcome: 'refused', route: '/update_weights_from_disk' })
})

t.test('running requests are counted by version; what they say is shown only with prompts', async t => {
  for (const prompts of [false, true]) {
    const engine = new FakeEngine({ stepMs: 20 })
    const { url } = await routeApp(t, { engine, ui: { prompts } })
    const done = call(`${url}/generate`, {
      text: 'a secret',
      rid: 'one',
      sampling_params: { max_new_tokens: 200, ignore_eos: true }
    })
    let state: any
    await until(() => engine.live === 1)
    for (;;) {
      const { json } = await call(`${url}/ui/state`)
      state = json.state
      if (state.requests.length > 0) break
    }
    t.same(state.versions, [['default', 1]])
    t.match(state.requests, [{ id: 'one', version: 'default', versions: 1 }])
    t.equal(JSON.stringify(state).includes('secret'), prompts)
    t.equal(state.requests[0].prompt, prompts ? 'a secret' : undefined)
    engine.abortAll()
    await done
  }
})

t.test('a closing server ends the streams of its pages', async t => {
  const { url, app } = await routeApp(t, { ui: true })
  const reply = await fetch(`${url}/ui/events`)
  const reader = reply.body!.getReader()
  await reader.read()
  const closed = app.close()
  for (;;) if ((await reader.read()).done) break
  await closed
  t.pass('closed')
})
