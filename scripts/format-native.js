import { spawnSync } from 'node:child_process'
import { readdirSync } from 'node:fs'
import { dirname, join } from 'node:path'
import { fileURLToPath } from 'node:url'

// Formats native/**/*.{h,cc,cu,cuh} by native/.clang-format; with --check only says which files differ (exit 1).

const VERSION = 14
const root = join(dirname(fileURLToPath(import.meta.url)), '..')
process.chdir(root)
const check = process.argv.slice(2).includes('--check')

// Other versions format differently in places.
const command = [`clang-format-${VERSION}`, 'clang-format'].find(name => {
  const { status, stdout } = spawnSync(name, ['--version'], { encoding: 'utf8' })
  return status === 0 && new RegExp(`version ${VERSION}\\.`).test(stdout)
})
if (command === undefined) {
  console.error(`refit: clang-format ${VERSION} not found: install it (on Debian or Ubuntu: apt-get install -y clang-format-${VERSION})`)
  process.exit(2)
}
const files = readdirSync('native', { recursive: true }).filter(file => /\.(h|cc|cuh?)$/.test(file)).sort().map(file => join('native', file))
const args = check ? ['--dry-run', '--Werror'] : ['-i']
const wrong = files.filter(file => spawnSync(command, [...args, file], { stdio: ['ignore', 'ignore', 'ignore'] }).status !== 0)
if (wrong.length > 0) {
  console.error(`refit: ${check ? 'not formatted' : 'could not be formatted'}:\n${wrong.map(file => `  ${file}`).join('\n')}`)
  if (check) console.error('refit: run "npm run format"')
  process.exit(1)
}
console.log(`refit: ${files.length} native files ${check ? 'are formatted' : 'formatted'}`)
