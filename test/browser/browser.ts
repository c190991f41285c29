import { chromium } from 'playwright-core'
import type { Browser, BrowserContextOptions, Page } from 'playwright-core'
import type { Test } from 'tap'

// Functions that run in the page see these.
declare const document: any

let browser: Promise<Browser> | undefined

export interface OpenPage {
  page: Page
  /** Errors of the console and of scripts, and violations of the page's policy. */
  problems: string[]
}

/** One Chromium for all tests of a process. */
export async function launch (): Promise<Browser> {
  const executablePath = process.env.REFIT_CHROMIUM
  if (executablePath === undefined) throw new Error('REFIT_CHROMIUM is not set: run "npm run test:ui"')
  // The sandbox needs rights that root and containers lack. The pages are our own.
  return await (browser ??= chromium.launch({ executablePath, args: ['--no-sandbox', '--disable-gpu'] }))
}

/** Opens the page of a server, in a context of its own. */
export async function openPage (t: Test, url: string, options: BrowserContextOptions = {}): Promise<OpenPage> {
  const context = await (await launch()).newContext({ viewport: { width: 1280, height: 900 }, ...options })
  t.teardown(async () => await context.close())
  const page = await context.newPage()
  const problems: string[] = []
  page.on('console', message => {
    if (message.type() === 'error' || message.type() === 'warning') problems.push(message.text())
  })
  page.on('pageerror', error => problems.push(String(error.stack)))
  await page.addInitScript(() => {
    document.addEventListener('securitypolicyviolation', ({ violatedDirective, blockedURI }: any) => {
      console.error(`policy: ${violatedDirective} ${blockedURI}`)
    })
  })
  await page.goto(`${url}/ui/`)
  return { page, problems }
}

export async function isLive (page: Page): Promise<void> {
  await page.waitForSelector('#live[data-live=yes]', { timeout: 60_000 })
}

export async function closeBrowser (): Promise<void> {
  await (await browser)?.close()
}

export async function post (url: string, path: string, body: object = {}): Promise<any> {
  const reply = await fetch(url + path, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify(body)
  })
  return await reply.json()
}
