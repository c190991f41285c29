import { spawn, spawnSync } from 'node:child_process'
import { once } from 'node:events'
import { cpSync, mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { dirname, join } from 'node:path'
import { createInterface } from 'node:readline'
import { fileURLToPath } from 'node:url'
import assert from 'node:assert/strict'

// npm run test:package: checks the package as a user gets it. Packs it, checks its files, installs it into an empty
// folder, serves from there, and type-checks a program that uses it.

const root = join(dirname(fileURLToPath(import.meta.url)), '..', '..')
const folder = mkdtempSync(join(tmpdir(), 'refit-package-'))
const { version } = JSON.parse(readFileSync(join(root, 'package.json'), 'utf8'))
const addon = `prebuilds/${process.platform}-${process.arch}/refit.node`
let passed = 0

try {
  const tarball = await check('npm pack holds what is needed and nothing else', pack)
  await check('it installs into an empty folder without running a script', () => install(tarball))
  await check('importing it loads no addon', importIt)
  await check('npx refit serve answers', serve)
  await check('a program that uses it type-checks under nodenext', typecheck)
  console.log(`${passed} passed, 0 failed`)
} catch (error) {
  console.error(error)
  console.log(`${passed} passed, 1 failed`)
  process.exitCode = 1
} finally {
  rmSync(folder, { recursive: true, force: true })
}

function pack () {
  const [{ filename, files, size }] = JSON.parse(
    npm(root, ['pack', '--json', '--ignore-scripts', '--pack-destination', folder])
  )
  const paths = files.map(({ path }) => path)
  for (
    const path of [
      'bin/refit.js',
      'dist/src/main.js',
      'dist/src/index.js',
      'dist/src/index.d.ts',
      'dist/src/engine/worker.js',
      addon,
      'native/CMakeLists.txt',
      'native/cuda/CMakeLists.txt',
      'native/cuda/group/nccl.cc',
      'native/addon.cmake',
      'scripts/build-native.js',
      'scripts/native/build.js',
      'models/adder-base/model.safetensors',
      'models/adder/model.safetensors',
      'openapi/openapi.json',
      'docs/configuration.md',
      'ui/index.html',
      'ui/main.js',
      'README.md',
      'LICENSE',
      'CHANGELOG.md'
    ]
  ) {
    assert.ok(paths.includes(path), `${path} is missing from the package`)
  }
  const strangers = paths.filter(path =>
    [
      /(^|\/)(test|\.ci|node_modules|build|__pycache__)\/|\.test\.|\.[jt]s\.map$|\.tsbuildinfo$/,
      /^dist\/(bench|scripts|examples)|^(src|routes|bench)\/|^native\/(probe|bench_gpu)\//
    ]
      .some(pattern => pattern.test(path))
  )
  assert.deepEqual(strangers, [], 'files that a user does not need')
  console.log(`  ${paths.length} files, ${(size / 1e6).toFixed(1)} MB packed`)
  return join(folder, filename)
}

function install (tarball) {
  mkdirSync(join(folder, 'app'))
  writeFileSync(join(folder, 'app', 'package.json'), '{ "name": "consumer", "private": true, "type": "module" }\n')
  npm(join(folder, 'app'), [
    'install',
    '--ignore-scripts',
    '--omit=dev',
    '--prefer-offline',
    '--no-audit',
    '--no-fund',
    tarball
  ])
  const installed = JSON.parse(readFileSync(join(folder, 'app', 'node_modules', 'refit', 'package.json'), 'utf8'))
  assert.equal(installed.version, version)
  for (const script of ['preinstall', 'install', 'postinstall']) {
    assert.equal(installed.scripts[script], undefined, `${script} would run at users' places`)
  }
}

function importIt () {
  const script = `
    const refit = await import('refit')
    const fs = await import('node:fs')
    if (fs.readFileSync('/proc/self/maps', 'utf8').includes('refit.node')) throw new Error('the addon is loaded')
    for (const name of ['default', 'createEngine', 'buildServer', 'RefitClient', 'RefitError']) {
      if (refit[name] === undefined) throw new Error(name + ' is not exported')
    }
    await import('refit/package.json', { with: { type: 'json' } })`
  run(join(folder, 'app'), process.execPath, ['--no-warnings', '--input-type=module', '-e', script])
}

async function serve () {
  const app = join(folder, 'app')
  assert.match(run(app, 'npx', ['--no-install', 'refit', '--version']), new RegExp(`^${version}$`, 'm'))
  const model = join(app, 'node_modules', 'refit', 'models', 'adder-base')
  const server = spawn(join(app, 'node_modules', '.bin', 'refit'), ['serve', model, '--port', '0', '--threads', '1'], {
    cwd: app,
    stdio: ['ignore', 'pipe', 'inherit']
  })
  try {
    const url = await address(server)
    const reply = run(app, 'curl', [
      '-fsS',
      `${url}/generate`,
      '-H',
      'content-type: application/json',
      '-d',
      JSON.stringify({ text: '12+345=', sampling_params: { max_new_tokens: 4, temperature: 0 } })
    ])
    assert.ok(JSON.parse(reply).meta_info.completion_tokens > 0, reply)
    assert.match(run(app, 'curl', ['-fsSL', `${url}/ui`]), /<script type="module" src="main.js">/)
    assert.match(run(app, 'curl', ['-fsS', `${url}/ui/uplot.js`]), /uPlot/)
    server.kill('SIGTERM')
    assert.deepEqual(await once(server, 'exit'), [0, null], 'the exit after SIGTERM')
  } finally {
    server.kill('SIGKILL')
  }
}

async function address (server) {
  for await (const line of createInterface({ input: server.stdout })) {
    const url = /http:\/\/127\.0\.0\.1:\d+/.exec(line)
    if (url !== null) {
      server.stdout.resume()
      return url[0]
    }
  }
  throw new Error(`the server ended before it listened (exit code ${server.exitCode})`)
}

function typecheck () {
  const app = join(folder, 'app')
  // A user would install them; they are here, and have no packages of their own but undici-types.
  mkdirSync(join(app, 'node_modules', '@types'), { recursive: true })
  for (const name of ['@types/node', 'undici-types']) {
    cpSync(join(root, 'node_modules', name), join(app, 'node_modules', name), { recursive: true })
  }
  cpSync(join(root, 'test', 'package', 'consumer.ts'), join(app, 'consumer.ts'))
  writeFileSync(
    join(app, 'tsconfig.json'),
    JSON.stringify({
      compilerOptions: {
        module: 'nodenext',
        target: 'es2022',
        strict: true,
        noEmit: true,
        types: ['node'],
        skipLibCheck: false
      },
      files: ['consumer.ts']
    })
  )
  const compile = (name, ...options) => {
    run(app, process.execPath, [join(root, 'node_modules', name, 'bin', 'tsc'), '-p', '.', ...options])
  }
  // All declarations, ours and those that they import; TypeScript 6 takes six times as long for that.
  compile('typescript-7')
  compile('typescript', '--skipLibCheck')
}

async function check (title, test) {
  const began = performance.now()
  const result = await test()
  passed++
  console.log(`ok ${passed} - ${title} (${((performance.now() - began) / 1000).toFixed(1)} s)`)
  return result
}

function npm (cwd, args) {
  return run(cwd, 'npm', args)
}

function run (cwd, command, args) {
  const { status, stdout, stderr } = spawnSync(command, args, { cwd, encoding: 'utf8', maxBuffer: 64 << 20 })
  if (status !== 0) throw new Error(`${command} ${args.join(' ')} ended with ${status}\n${stdout}\n${stderr}`)
  return stdout
}
