import { spawnSync } from 'node:child_process'
import { existsSync } from 'node:fs'
import { dirname, join } from 'node:path'
import { fileURLToPath } from 'node:url'

// npm run test:ui [-- --screenshots]: the page in a real Chromium: $REFIT_CHROMIUM, or one of the usual places (Debian:
// apt install chromium). With --screenshots it writes those of the README into docs/images instead.

process.chdir(join(dirname(fileURLToPath(import.meta.url)), '..'))
const SKIP = 77
const PLACES = ['/usr/bin/chromium', '/usr/bin/chromium-browser', '/usr/bin/google-chrome', '/snap/bin/chromium']
const browser = process.env.REFIT_CHROMIUM ?? PLACES.find(place => existsSync(place))
if (browser === undefined || !existsSync(browser)) {
  console.error('!!!!! THERE IS NO CHROMIUM: NOTHING OF THE PAGE WAS TESTED (apt install chromium) !!!!!')
  process.exit(SKIP)
}
run(join('scripts', 'test.js'), join('test', 'browser'), '--jobs=1')
if (process.argv.includes('--screenshots')) run(join('build', 'test', 'test', 'browser', 'screenshots.js'))

function run (...args) {
  const { status } = spawnSync(process.execPath, args, {
    stdio: 'inherit',
    env: { ...process.env, REFIT_CHROMIUM: browser }
  })
  if (status !== 0) process.exit(status ?? 1)
}
