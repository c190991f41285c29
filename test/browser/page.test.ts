import { readFileSync } from 'node:fs'
import { join } from 'node:path'
import { setTimeout } from 'node:timers/promises'
import t from 'tap'
import { eventually } from '../helpers/eventually.ts'
import { engineServer, gatewayTo, modelFolder } from '../helpers/gateway.ts'
import { closeBrowser, isLive, openPage, post } from './browser.ts'

// Functions that run in the page see these.
declare const document: any
declare const window: any

const PATIENCE = { timeout: 60_000 }

t.teardown(closeBrowser)

t.test('it loads, shows the state, and breaks no rule of its policy', async t => {
  const { url } = await engineServer(t, modelFolder(t), { ui: true })
  const { page, problems } = await openPage(t, url)
  await isLive(page)
  await page.waitForSelector('#tiles dd')
  t.equal(await page.textContent('#status'), 'current')
  t.match(await page.textContent('#tiles'), /Version.*default/)
  t.match(await page.title(), /^default · ok/)
  t.equal(await page.locator('canvas').count(), 4, 'four charts')
  t.ok(await page.isVisible('#updates-empty'))
  await page.reload()
  await isLive(page)
  t.same(problems, [])
  t.equal(
    await page.evaluate(() => {
      const script = document.createElement('script')
      script.textContent = 'window.broken = true'
      document.body.append(script)
      return window.broken
    }),
    undefined,
    'an inline script does not run'
  )
  t.ok(problems.every(text => /script-src|inline/.test(text)), problems.join('\n'))
})

t.test('an update that has just happened is shown, with its phases and a trace', async t => {
  const folder = modelFolder(t)
  const { url } = await engineServer(t, folder, { ui: true })
  const { page, problems } = await openPage(t, url)
  await isLive(page)
  await post(url, '/update_weights_from_disk', { model_path: join(folder, 'adder'), weight_version: 'step-1' })
  const line = page.locator('button.line')
  await page.locator('.tag[data-outcome=done]').waitFor(PATIENCE)
  t.match(await line.textContent(), /done.*sglang \/update_weights_from_disk.*default → step-1.*ms.*kB.*GB\/s/)
  await page.waitForFunction(() => document.querySelector('#tiles').textContent.includes('step-1'), null, PATIENCE)
  await line.click()
  t.equal(await line.getAttribute('aria-expanded'), 'true')
  const phases = await page.locator('.gantt .track').evaluateAll(tracks =>
    tracks.map(track => (track as any).dataset.phase)
  )
  t.same(phases, ['announce', 'wait', 'plan', 'gate', 'scatter', 'verify', 'commit', 'close'])
  const [download] = await Promise.all([
    page.waitForEvent('download', PATIENCE),
    page.getByRole('button', { name: 'Download trace' }).click()
  ])
  const trace = JSON.parse(readFileSync(await download.path(), 'utf8'))
  t.ok(trace.traceEvents.some(({ name }: { name: string }) => name === 'scatter'))
  await post(url, '/update_weights_from_disk', { model_path: '/nowhere' })
  await page.locator('.tag[data-outcome=refused]').waitFor(PATIENCE)
  t.equal(await page.locator('button.line').count(), 2)
  t.equal(await line.nth(1).getAttribute('aria-expanded'), 'true', 'the open one stays open')
  t.same(problems, [])
})

t.test('each token has the colour of its version', async t => {
  const folder = modelFolder(t)
  const { url, engine } = await engineServer(t, folder, { ui: true })
  const { page, problems } = await openPage(t, url)
  await isLive(page)
  await page.fill('#prompt', '123+456=')
  await page.fill('#max-tokens', '1500')
  await page.check('#ignore-eos')
  await page.press('#prompt', 'Enter')
  // A busy browser shows the first token when the last has been generated.
  await eventually(async () => await setTimeout(1, engine.stats), ({ generationTokens }) => generationTokens > 0)
  await post(url, '/pause_generation', { mode: 'in_place' })
  await post(url, '/update_weights_from_disk', { model_path: join(folder, 'adder'), weight_version: 'step-2' })
  await post(url, '/continue_generation')
  await page.waitForFunction(() => document.querySelector('#go').textContent === 'Generate', null, PATIENCE)
  const tokens = await page.locator('.token').evaluateAll(list =>
    list.map(token => ({ v: (token as any).dataset.v, title: (token as any).getAttribute('title') }))
  )
  t.equal(tokens.length, 1500)
  const versions = [...new Set(tokens.map(({ title }) => /^version (.*)\n/.exec(title)![1]))]
  t.same(versions, ['default', 'step-2'])
  t.equal(new Set(tokens.map(({ v }) => v)).size, 2, 'two colours')
  t.match(await page.textContent('#output-key'), /default.*step-2/)
  t.same(problems, [])
})

t.test('it survives a restart of the server', async t => {
  const folder = modelFolder(t)
  const first = await engineServer(t, folder, { ui: true })
  const { page, problems } = await openPage(t, first.url)
  await isLive(page)
  await post(first.url, '/update_weights_from_disk', { model_path: join(folder, 'adder'), weight_version: 'old' })
  await page.locator('button.line').waitFor(PATIENCE)
  await first.kill()
  await page.waitForSelector('#live[data-live=no]', PATIENCE)
  const second = await engineServer(t, folder, { ui: true, port: first.port, weightVersion: 'new' })
  await isLive(page)
  await page.waitForFunction(() => document.title.startsWith('new'), null, PATIENCE)
  t.equal(await page.locator('button.line').count(), 0, 'its log begins anew')
  await post(second.url, '/update_weights_from_disk', { model_path: join(folder, 'adder'), weight_version: 'newer' })
  await page.locator('button.line').waitFor(PATIENCE)
  t.same(problems.filter(text => !/ERR_CONNECTION_REFUSED|ERR_INCOMPLETE|ERR_EMPTY|Failed to fetch/.test(text)), [])
})

t.test('a server with a key: the page asks for it, says when it is wrong, and then shows everything', async t => {
  const { url } = await engineServer(t, modelFolder(t), { ui: true, apiKey: 'right' })
  const { page } = await openPage(t, url)
  await page.locator('#key-dialog[open]').waitFor(PATIENCE)
  t.equal(await page.evaluate(() => document.activeElement.id), 'key-input')
  t.equal(await page.textContent('#tiles'), '', 'nothing is shown')
  await page.keyboard.type('wrong')
  await page.keyboard.press('Enter')
  await page.waitForFunction(
    () => /has refused this key/.test(document.querySelector('#key-note').textContent),
    null,
    PATIENCE
  )
  await page.locator('#key-dialog[open]').waitFor(PATIENCE)
  await page.keyboard.type('right')
  await page.keyboard.press('Enter')
  await isLive(page)
  await page.fill('#prompt', '1+1=')
  await page.press('#prompt', 'Enter')
  await page.locator('.token').first().waitFor(PATIENCE)
  t.notMatch(page.url(), /right/)
  await page.reload()
  await isLive(page)
  t.notOk(await page.locator('#key-dialog[open]').count(), 'a reload of the tab keeps the key')
})

t.test("a gateway's page has a row for each engine, and the details of the chosen one", async t => {
  const folder = modelFolder(t)
  const engines = [await engineServer(t, folder, { ui: true }), await engineServer(t, folder, { ui: true })]
  const { url } = await gatewayTo(t, engines.map(({ url }) => url), { ui: true })
  const { page, problems } = await openPage(t, url)
  await isLive(page)
  const rows = page.locator('#engines button')
  await rows.nth(1).waitFor(PATIENCE)
  t.same(await rows.evaluateAll(list => list.map(row => (row as any).getAttribute('aria-pressed'))), ['true', 'false'])
  await rows.nth(1).click()
  await page.locator('#engines li:nth-child(2) button[aria-pressed=true]').waitFor(PATIENCE)
  await post(url, '/update_weights_from_disk', { model_path: join(folder, 'adder'), weight_version: 'step-3' })
  await page.waitForFunction(() => document.querySelectorAll('button.line').length === 2, null, PATIENCE)
  for (const { port } of engines) t.match(await page.textContent('#update-list'), new RegExp(`:${port}: sglang`))
  await page.fill('#prompt', '1+1=')
  await page.press('#prompt', 'Enter')
  await page.locator('.token').first().waitFor(PATIENCE)
  t.same(problems, [])
})

t.test("a trainer's logprobs are shown by version, and those that are far from the engine's", async t => {
  const { url } = await engineServer(t, modelFolder(t), { ui: true, truthWarn: 0.05, weightVersion: 'step-9' })
  const { page, problems } = await openPage(t, url)
  await isLive(page)
  t.match(await page.textContent('#truth'), /No trainer has sent logprobs/)
  for (const [rid, shift] of [['near', 0.01], ['far', 0.25]] as const) {
    const sampling = { max_new_tokens: 4, ignore_eos: true }
    const body = { rid, input_ids: [49], receipt: true, return_logprob: true, sampling_params: sampling }
    const { meta_info: meta } = await post(url, '/generate', body)
    const logprobs = meta.output_token_logprobs.map(([logprob]: [number]) => logprob - shift)
    await post(url, '/truth', { samples: [{ id: rid, logprobs }] })
  }
  await page.waitForFunction(() => /^2 samples/.test(document.querySelector('#truth-note').textContent), null, PATIENCE)
  t.equal(await page.textContent('#truth-note'), '2 samples, 1 report above --truth-warn 0.05')
  t.match(await page.textContent('#truth'), /step-9 8 tokens.*mean 0\.13, max 0\.25.*KL 0\.0.*clipped 0\.0 %.*far from/)
  t.same(problems, [])
})

t.test('torn weights are named', async t => {
  const { url, engine } = await engineServer(t, modelFolder(t), { ui: true })
  const { page } = await openPage(t, url)
  await isLive(page)
  await engine.scrambleWeights()
  await page.locator('#notice[data-kind=bad]').waitFor(PATIENCE)
  t.match(await page.textContent('#notice'), /tensors torn: model\.embed_tokens\.weight, .* and \d+ more\. Reason: /)
  t.match(await page.textContent('#status'), /^torn \(\d+\)$/)
})
