import { mkdirSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { setTimeout as sleep } from 'node:timers/promises'
import { createEngine } from '../../src/app/create-engine.ts'
import { createServer } from '../../src/app/server.ts'
import { packageRoot } from '../../src/root.ts'
import { closeBrowser, isLive, launch, post } from './browser.ts'
import { smallPng } from './small-png.ts'

// Functions that run in the page see these.
declare const document: any

// Writes docs/images/ui-light.png and ui-dark.png: a server that generates while its weights are replaced.
// usage: npm run test:ui -- --screenshots

const models = join(packageRoot, 'models')
const folder = join(packageRoot, 'docs', 'images')
const engine = await createEngine(join(models, 'adder-base'), {
  threads: 1,
  maxTotalTokens: 16_384,
  servedModelName: 'adder'
})
const app = await createServer({ engine, modelRoots: [models], ui: true, closeGraceMs: 100 })
const url = await app.listen({ port: 0, host: '127.0.0.1' })
mkdirSync(folder, { recursive: true })

const running = new AbortController()
const requests = Array.from({ length: 6 }, async (_, i) => {
  while (!running.signal.aborted) {
    await post(url, '/generate', {
      text: `${123 + i}+456=`,
      sampling_params: { max_new_tokens: 1200 + 90 * i, ignore_eos: true, temperature: 0.8 }
    })
  }
})
let step = 40
const update = async (): Promise<void> => {
  await post(url, '/pause_generation', { mode: 'in_place' })
  const path = join(models, step % 2 === 0 ? 'adder' : 'adder-base')
  await post(url, '/update_weights_from_disk', { model_path: path, weight_version: `step-${++step}` })
  await post(url, '/continue_generation')
}
for (let i = 0; i < 5; i++) {
  await update()
  if (i === 2) await post(url, '/update_weights_from_disk', { model_path: '/checkpoints/step-45' })
  await sleep(4000)
}
for (const colorScheme of ['light', 'dark'] as const) {
  const context = await (await launch()).newContext({ colorScheme, viewport: { width: 1280, height: 1000 } })
  const page = await context.newPage()
  await page.goto(`${url}/ui/`)
  await isLive(page)
  await page.fill('#prompt', '123+456=')
  await page.fill('#max-tokens', '420')
  await page.check('#ignore-eos')
  await page.click('#go')
  await page.locator('.token').nth(120).waitFor({ timeout: 60_000 })
  await update()
  await page.waitForFunction(() => document.querySelectorAll('.token').length > 400, null, { timeout: 60_000 })
  await page.locator('button.line').first().click()
  await page.mouse.move(0, 0)
  await page.evaluate(() => document.activeElement.blur())
  await sleep(600)
  // Not the facts below, which are empty here.
  const { y } = (await page.locator('.four').boundingBox())!
  const png = await page.screenshot({ fullPage: true, clip: { x: 0, y: 0, width: 1280, height: Math.floor(y) } })
  writeFileSync(join(folder, `ui-${colorScheme}.png`), smallPng(png))
  await context.close()
}
running.abort()
await closeBrowser()
engine.abortAll()
await Promise.all(requests)
await app.close()
await engine.close()
