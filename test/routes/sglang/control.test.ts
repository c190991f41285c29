import t from 'tap'
import { call, routeApp, until } from '../../helpers/route-app.ts'
import { FakeEngine } from '../../helpers/fake-engine.ts'

const FLUSHED = 'Cache flushed.\nPlease check backend logs for more details. ' +
  '(When there are running or waiting requests, the operation will not be performed.)\n'

t.test('pause and continue reply as SGLang does, with any body', async t => {
  const { url, engine } = await routeApp(t)
  const paused = { message: 'Generation paused successfully.', status: 'ok' }
  t.same((await call(`${url}/pause_generation`, {})).json, paused)
  t.same((await call(`${url}/pause_generation`, { mode: 'retract', rid: null, http_worker_ipc: null })).json, paused)
  t.same((await call(`${url}/pause_generation`, undefined, { method: 'POST' })).json, paused, 'no body')
  t.same(
    (await call(`${url}/pause_generation`, undefined, {
      method: 'POST',
      headers: { 'content-type': 'application/json' }
    }))
      .json,
    paused,
    'an empty one'
  )
  t.same((await call(`${url}/pause_generation`, { mode: 'in_place' })).json, paused)
  t.same((await call(`${url}/continue_generation`, { torch_empty_cache: false })).json, {
    message: 'Generation continued successfully.',
    status: 'ok'
  })
  t.equal((await call(`${url}/continue_generation`, {})).status, 200, 'again')
  t.same(engine.calls.filter(name => !name.startsWith('abort')), [
    'pause abort',
    'pause retract',
    'pause abort',
    'pause abort',
    'pause in_place',
    'resume',
    'resume'
  ])
})

t.test('an unknown mode, or null, is refused with the choices', async t => {
  const { url, engine } = await routeApp(t)
  const reply = await call(`${url}/pause_generation`, { mode: 'x' })
  t.equal(reply.status, 400)
  t.match(reply.json, {
    object: 'error',
    type: 'Bad Request',
    code: 400,
    param: 'mode',
    message: 'mode: expected "abort", "retract" or "in_place", got "x"'
  })
  t.equal((await call(`${url}/pause_generation`, { mode: null })).status, 400)
  t.same(engine.calls, [])
})

t.test('requests wait during a pause and continue afterwards', async t => {
  const { url, engine } = await routeApp(t)
  await call(`${url}/pause_generation`, { mode: 'in_place' })
  let done = false
  const pending = call(`${url}/generate`, { input_ids: [5], sampling_params: { max_new_tokens: 2 } }).then(reply => {
    done = true
    return reply
  })
  await until(() => engine.live === 1)
  t.equal((await call(`${url}/health`)).json.status, 'paused')
  t.notOk(done)
  await call(`${url}/continue_generation`, {})
  t.same((await pending).json.output_ids, [5, 5])
})

t.test('continue succeeds while weights are torn, and reports that nothing is generated', async t => {
  const { url, engine } = await routeApp(t)
  engine.weights = { state: 'torn', tensors: ['a'], reason: 'a read failed' }
  const reply = await call(`${url}/continue_generation`, {})
  t.equal(reply.status, 200)
  t.match(reply.json, { status: 'torn', message: /a read failed/ })
})

t.test('flush_cache replies with text, by GET and POST', async t => {
  const { url, engine } = await routeApp(t)
  for (const method of ['GET', 'POST']) {
    const reply = await call(`${url}/flush_cache`, undefined, { method })
    t.equal(reply.status, 200)
    t.equal(reply.text, FLUSHED)
  }
  engine.stepMs = 2
  const pending = call(`${url}/generate`, { input_ids: [5], sampling_params: { max_new_tokens: 500 } })
  await until(() => engine.live === 1)
  const busy = await call(`${url}/flush_cache`)
  t.equal(busy.status, 400)
  t.equal(busy.text, 'Flush cache failed.\n')
  const late = await call(`${url}/flush_cache?timeout=0.02`)
  t.equal(late.status, 400)
  t.equal(late.text, 'Timed out waiting for idle state.')
  const waiting = call(`${url}/flush_cache?timeout=20`)
  await until(() => engine.calls.includes('flush 20000'))
  const second = await call(`${url}/flush_cache`)
  t.equal(second.status, 400)
  t.equal(second.text, 'Another flush_cache is already in progress.')
  await call(`${url}/abort_request`, { abort_all: true })
  await pending
  t.equal((await waiting).text, FLUSHED)
  t.match((await call(`${url}/flush_cache?timeout=-1`)).json.message, /timeout: expected a number >= 0/)
  t.match((await call(`${url}/flush_cache?timeout=soon`)).json.message, /timeout: expected a finite number, got "soon"/)
})

t.test('abort_all ends every request, whatever rid is sent with it', async t => {
  for (const body of [{ abort_all: true }, { abort_all: true, rid: 'one' }, { abort_all: true, rid: 'nobody' }]) {
    const { url, engine } = await routeApp(t, { engine: new FakeEngine({ stepMs: 20 }) })
    const running = ['one', 'two', 'three'].map(async rid =>
      await call(`${url}/generate`, { rid, input_ids: [5], sampling_params: { max_new_tokens: 200 } })
    )
    await until(() => engine.live === 3)
    t.equal((await call(`${url}/abort_request`, body)).status, 200)
    for (const reply of await Promise.all(running)) t.equal(reply.json.meta_info.finish_reason.type, 'abort')
  }
})

t.test('abort_request has an empty reply body and ignores unknown ids', async t => {
  const { url, engine } = await routeApp(t, { engine: new FakeEngine({ stepMs: 2 }) })
  for (const body of [{ rid: 'nobody' }, { rid: '' }, {}, { abort_all: 'true' }, { rid: '', prefix: true }]) {
    const reply = await call(`${url}/abort_request`, body)
    t.equal(reply.status, 200)
    t.equal(reply.text, '')
  }
  t.same(engine.calls, ['abortAll'])
})
