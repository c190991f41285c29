import { spawnSync } from 'node:child_process'
import { join, dirname } from 'node:path'
import { fileURLToPath } from 'node:url'

// npm run test:hostile [-- --minutes 60 --only WORD --seed N --health-ms 250]
// Compiles the tests, then attacks three processes of refit (test/hostile/run.ts).

process.chdir(join(dirname(fileURLToPath(import.meta.url)), '..'))
// Builds the addon, compiles all tests, and runs the tests of the suite itself.
run(join('scripts', 'test.js'), 'test/hostile')
run(join('build', 'test', 'test', 'hostile', 'run.js'), ...process.argv.slice(2))

function run (...args) {
  const { status } = spawnSync(process.execPath, args, { stdio: 'inherit' })
  if (status !== 0) process.exit(status ?? 1)
}
