import { spawnSync } from 'node:child_process'
import { existsSync } from 'node:fs'
import { dirname, join } from 'node:path'
import { fileURLToPath } from 'node:url'

// npm runs this after `npm ci` in a checkout and before `npm pack`. As a dependency the package arrives built.

process.chdir(join(dirname(fileURLToPath(import.meta.url)), '..'))
run([join('scripts', 'build-native.js')])
const typescript = join('node_modules', 'typescript-7', 'bin', 'tsc')
// Checking the types would take longer than all else that the compiler does. `npm run typecheck` does it.
if (existsSync(typescript)) run([typescript, '-p', 'tsconfig.build.json', '--noCheck'])
else if (!existsSync(join('dist', 'src', 'main.js'))) {
  console.error(
    'refit: the TypeScript is not compiled, because its compiler is a devDependency and these were left out. ' +
      'To build without them:\n' +
      '  npm ci && npm prune --omit=dev --ignore-scripts'
  )
}

function run (args) {
  const { status } = spawnSync(process.execPath, args, { stdio: 'inherit' })
  if (status !== 0) process.exit(status ?? 1)
}
