import { join } from 'node:path'
import t from 'tap'
import { engineServer, modelFolder } from '../helpers/gateway.ts'
import { closeBrowser, isLive, openPage, post } from './browser.ts'

// Functions that run in the page see these.
declare const document: any
declare const getComputedStyle: any
declare const innerWidth: any

const PATIENCE = { timeout: 60_000 }
const LONG =
  'a-very-long-label-of-a-version-without-any-space-in-it-that-somebody-made-from-a-branch-and-a-date-2026-11-24'

t.teardown(closeBrowser)

t.test('everything works by keyboard', async t => {
  const folder = modelFolder(t)
  const { url } = await engineServer(t, folder, { ui: true })
  const { page } = await openPage(t, url)
  await isLive(page)
  for (const step of [1, 2, 3]) {
    await post(url, '/update_weights_from_disk', { model_path: join(folder, 'adder'), weight_version: `step-${step}` })
  }
  // The page shows an update before it has ended.
  await page.waitForFunction(
    () => {
      const lines = document.querySelectorAll('button.line')
      return lines.length === 3 && lines[0].textContent.includes('→ step-3')
    },
    null,
    PATIENCE
  )
  const focused = async (): Promise<string> => await page.evaluate(() => document.activeElement?.textContent ?? '')
  await page.keyboard.press('Tab')
  t.match(await focused(), /Skip to the updates/)
  await page.keyboard.press('Enter')
  await page.keyboard.press('Tab')
  t.match(await focused(), /→ step-3/)
  await page.keyboard.press('Enter')
  t.equal(await page.locator('button.line').first().getAttribute('aria-expanded'), 'true')
  t.match(await focused(), /→ step-3/, 'the focus stays')
  await page.keyboard.press('ArrowDown')
  t.match(await focused(), /→ step-2/)
  await page.keyboard.press('Space')
  t.equal(await page.locator('button.line').nth(1).getAttribute('aria-expanded'), 'true')
  await page.keyboard.press('ArrowUp')
  t.match(await focused(), /→ step-3/)
  await page.keyboard.press('Enter')
  t.equal(await page.locator('button.line').first().getAttribute('aria-expanded'), 'false')
  await page.locator('#key').press('Enter')
  t.ok(await page.locator('#key-dialog[open]').count())
  await page.keyboard.press('Escape')
  t.notOk(await page.locator('#key-dialog[open]').count())
})

t.test('controls have names, and regions have titles', async t => {
  const { url } = await engineServer(t, modelFolder(t), { ui: true })
  const { page } = await openPage(t, url)
  await isLive(page)
  const unnamed = await page.evaluate(() =>
    [...document.querySelectorAll('button, input, textarea, section, [role=img]')]
      .filter((element: any) => {
        const by = element.getAttribute('aria-labelledby')
        const name = element.getAttribute('aria-label') ??
          (by === null ? null : document.getElementById(by)?.textContent)
        return ((name ?? element.labels?.[0]?.textContent ?? element.textContent) ?? '').trim() === ''
      })
      .map((element: any) => element.outerHTML.slice(0, 100))
  )
  t.same(unnamed, [])
  t.equal(await page.getAttribute('html', 'lang'), 'en')
  t.equal(await page.locator('h1').count(), 1)
})

for (const scheme of ['light', 'dark'] as const) {
  t.test(`in the ${scheme} colours, texts have enough contrast`, async t => {
    const { url } = await engineServer(t, modelFolder(t), { ui: true })
    const { page } = await openPage(t, url, { colorScheme: scheme })
    await isLive(page)
    t.equal(await page.getAttribute('html', 'data-theme'), scheme)
    const ratios = await page.evaluate(() => {
      const style = getComputedStyle(document.documentElement)
      const light = (name: string): number => {
        const hex = style.getPropertyValue(name).trim().slice(1)
        const [r, g, b] = [0, 2, 4].map(at => parseInt(hex.slice(at, at + 2), 16) / 255).map(value =>
          value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4
        )
        return 0.2126 * r! + 0.7152 * g! + 0.0722 * b!
      }
      const pairs = [
        ...['--card', '--bg'].flatMap(ground => ['--ink', '--ink-2', '--ink-3'].map(ink => [ink, ground])),
        ...['good', 'warn', 'bad', 'idle'].map(kind => [`--${kind}`, `--${kind}-bg`]),
        ['--good', '--card'],
        ['--bad', '--card'],
        ['--accent-ink', '--accent']
      ] as [string, string][]
      return pairs.map(([ink, ground]) => {
        const [a, b] = [light(ink), light(ground)]
        return [`${ink} on ${ground}`, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)] as const
      })
    })
    for (const [pair, ratio] of ratios) t.ok(ratio >= 4.5, `${pair}: ${ratio.toFixed(2)}`)
  })
}

t.test('a phone does not scroll sideways, whatever the names are', async t => {
  const folder = modelFolder(t)
  const { url, engine } = await engineServer(t, folder, { ui: true, weightVersion: LONG })
  for (const width of [320, 390, 768]) {
    const { page } = await openPage(t, url, { viewport: { width, height: 800 }, hasTouch: width < 700 })
    await isLive(page)
    await post(url, '/update_weights_from_disk', {
      model_path: join(folder, 'adder'),
      weight_version: `${LONG}-${width}`
    })
    await post(url, '/update_weights_from_disk', { model_path: `/${LONG}/${LONG}` })
    await page.locator('.tag[data-outcome=refused]').first().waitFor(PATIENCE)
    for (const line of await page.locator('button.line').all()) await line.click()
    await page.fill('#prompt', '1+1=')
    await page.press('#prompt', 'Enter')
    await page.locator('.token').first().waitFor(PATIENCE)
    const size = await page.evaluate(() => [document.documentElement.scrollWidth, innerWidth])
    t.equal(size[0], size[1], `${width} pixels`)
  }
  const { page } = await openPage(t, url, { viewport: { width: 320, height: 800 } })
  await isLive(page)
  await engine.scrambleWeights()
  await page.locator('#notice[data-kind=bad]').waitFor(PATIENCE)
  t.equal(await page.evaluate(() => document.documentElement.scrollWidth), 320, 'torn')
})
