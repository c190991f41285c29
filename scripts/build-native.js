import { spawn, spawnSync } from 'node:child_process'
import { copyFileSync, existsSync, mkdirSync, readFileSync, readdirSync, renameSync, rmSync, statSync, writeFileSync } from 'node:fs'
import { createRequire } from 'node:module'
import { basename, dirname, join, relative } from 'node:path'
import { fileURLToPath } from 'node:url'
import { parseArgs } from 'node:util'

// Builds the native addon into prebuilds/<platform>-<arch>/refit.node. With CMake where it is installed, else with the compiler
// alone: the same files and the same flags (a test compares the two).
//   --faults    also build/faults/refit.node, whose fault points tests can arm
//   --tests     instead builds and runs native/test/*_test.cc under the address and undefined-behaviour sanitizers (or --sanitize)
//   --no-cmake  the second way, even where CMake is installed
//   --commands  only prints the second way's compile commands, one JSON array a line
//   --verbose   shows what the tools say

const PARALLEL = 2
const MIN_GCC = 11
const MIN_CLANG = 14
const INSTALL = 'on Debian or Ubuntu: apt-get install -y g++ cmake'

const root = join(dirname(fileURLToPath(import.meta.url)), '..')
process.chdir(root)
const options = readOptions()
const tests = options.tests || options.sanitize
const started = Date.now()

if (process.platform !== 'linux' || !['x64', 'arm64'].includes(process.arch)) {
  fail(`refit runs on Linux (x64 or arm64), this is ${process.platform} ${process.arch}: use a container or a virtual machine with Linux`)
}
const compiler = findCompiler()
if (options.commands) {
  for (const { args } of [...kernelUnits('.'), ...coreUnits('.', false), ...coreUnits('.', true), ...bindingUnits('.', false), ...bindingUnits('.', true)]) {
    console.log(JSON.stringify(args))
  }
  process.exit(0)
}
const generator = options['no-cmake'] ? undefined : findGenerator()
const unlock = lock(join('build', 'native.lock'))
try {
  if (tests) await runTests()
  else await buildAddons()
} catch (error) {
  unlock()
  fail(error.message)
}
unlock()

function readOptions () {
  const names = ['faults', 'tests', 'sanitize', 'no-cmake', 'commands', 'verbose']
  try {
    return parseArgs({ options: Object.fromEntries(names.map(name => [name, { type: 'boolean' }])) }).values
  } catch {
    return fail(`unknown argument in "${process.argv.slice(2).join(' ')}": expected any of ${names.map(name => `--${name}`).join(' ')}`)
  }
}

async function buildAddons () {
  const wanted = [{ target: 'refit_node', file: 'refit.node', faults: false, to: join('prebuilds', `${process.platform}-${process.arch}`) }]
  if (options.faults) wanted.push({ target: 'refit_faults_node', file: 'refit-faults.node', faults: true, to: join('build', 'faults') })
  const folder = buildFolder('native')
  if (generator !== undefined) await cmake(folder, [], wanted.map(addon => addon.target))
  else for (const addon of wanted) await plainAddon(folder, addon)
  for (const addon of wanted) {
    const to = join(addon.to, 'refit.node')
    const changed = publish(join(folder, addon.file), to)
    say(`${to} ${changed ? `built in ${((Date.now() - started) / 1000).toFixed(1)} s` : 'is up to date'}`)
  }
}

async function runTests () {
  const folder = buildFolder('native-tests')
  if (generator !== undefined) await cmake(folder, ['-DREFIT_TESTS=ON', '-DREFIT_SANITIZE=ON'], [])
  else await plainTests(folder)
  const names = sources('test').filter(file => file.endsWith('_test.cc')).map(file => basename(file, '.cc'))
  if (names.length === 0) throw new Error('native/test has no *_test.cc')
  const failed = names.filter(name => spawnSync(join(folder, name), { stdio: 'inherit' }).status !== 0)
  if (failed.length > 0) throw new Error(`${failed.join(', ')} failed`)
  say(`${names.length} native test programs passed under ASan and UBSan in ${((Date.now() - started) / 1000).toFixed(1)} s`)
}

// --- with CMake

async function cmake (folder, flags, targets) {
  if (!existsSync(join(folder, 'CMakeCache.txt'))) {
    await tool('cmake', ['-S', 'native', '-B', folder, '-G', generator, `-DCMAKE_CXX_COMPILER=${compiler.command}`, ...flags])
  }
  await tool('cmake', ['--build', folder, '--parallel', String(PARALLEL), ...targets.flatMap(target => ['--target', target])])
}

/** The generator to use, or undefined where CMake, or every tool that it could drive, is missing or too old. */
function findGenerator () {
  const version = /version (\d+)\.(\d+)/.exec(output('cmake', ['--version']))
  if (version === null || Number(version[1]) < 3 || (Number(version[1]) === 3 && Number(version[2]) < 16)) return undefined
  if (output('make', ['--version']) !== '') return 'Unix Makefiles'
  return output('ninja', ['--version']) !== '' ? 'Ninja' : undefined
}

// --- with the compiler alone: native/CMakeLists.txt and native/cpu/sources.cmake, said again

/** Flags of every unit. */
function commonFlags () {
  return [...tests ? [] : ['-O3', '-DNDEBUG'], '-std=c++20', '-fPIC', '-Wall', '-Wextra', '-fno-math-errno', '-fvisibility=hidden',
    ...compiler.clang ? [] : ['-Wno-restrict'],
    ...tests ? ['-O1', '-g', '-fno-omit-frame-pointer', '-fsanitize=address,undefined', '-fno-sanitize-recover=all'] : [],
    '-Inative']
}

/** Flags of the units that hold one instruction set each. */
function isaFlags (source) {
  const isa = /_(scalar|avx2|avx512|avx512bf16)\.cc$/.exec(source)?.[1]
  if (isa === undefined) return []
  if (isa === 'scalar') return ['-ffp-contract=off']
  if (isa === 'avx2') return ['-ffp-contract=off', '-mavx2', '-mfma']
  return ['-ffp-contract=off', '-mavx512f', '-mavx512bw', '-mavx512dq', '-mavx512vl', '-mfma',
    ...compiler.clang ? [] : ['-Wno-uninitialized', '-Wno-maybe-uninitialized'], ...isa === 'avx512bf16' ? ['-mavx512bf16'] : []]
}

function kernelUnits (folder) {
  const files = sources('cpu').filter(file => process.arch === 'x64' || !/_avx\w+\.cc$/.test(file))
  return files.map(file => unit(join(folder, 'kernels'), file, isaFlags(file)))
}

function coreUnits (folder, faults) {
  const define = faults ? ['-DREFIT_FAULTS'] : []
  return [...sources('core'), ...sources('transport')].map(file => unit(join(folder, faults ? 'core-faults' : 'core'), file, define))
}

function bindingUnits (folder, faults) {
  const flags = ['-DNAPI_VERSION=9', ...faults ? ['-DREFIT_FAULTS'] : [],
    ...['node-addon-api', 'node-api-headers'].flatMap(name => ['-isystem', includeFolder(name)])]
  return sources('binding').map(file => unit(join(folder, faults ? 'binding-faults' : 'binding'), file, flags))
}

async function plainAddon (folder, { file, faults }) {
  await link(join(folder, file), [...kernelUnits(folder), ...coreUnits(folder, faults), ...bindingUnits(folder, faults)],
    ['-shared', '-static-libstdc++', '-static-libgcc', '-Wl,-z,nodelete',
      '-Wl,--version-script=native/binding/exports.map', '-pthread'])
}

async function plainTests (folder) {
  const shared = [...kernelUnits(folder), ...coreUnits(folder, true)]
  for (const source of sources('test').filter(file => file.endsWith('_test.cc'))) {
    await link(join(folder, basename(source, '.cc')), [...shared, unit(join(folder, 'test'), source, ['-DREFIT_FAULTS'])],
      ['-fsanitize=address,undefined', '-pthread'])
  }
}

function unit (folder, source, flags) {
  const object = join(folder, `${basename(source, '.cc')}.o`)
  return { object, args: [...commonFlags(), ...flags, '-MMD', '-c', source, '-o', object] }
}

/** Compiles what has changed, PARALLEL at a time, then links if anything did. */
async function link (to, units, flags) {
  const stale = units.filter(({ object, args }) => !isFresh(object, args))
  const queue = [...stale]
  await Promise.all(Array.from({ length: PARALLEL }, async () => {
    for (let next = queue.shift(); next !== undefined; next = queue.shift()) {
      mkdirSync(dirname(next.object), { recursive: true })
      await tool(compiler.command, next.args)
      writeFileSync(`${next.object}.args`, next.args.join('\n'))
    }
  }))
  const newest = Math.max(...units.map(({ object }) => statSync(object).mtimeMs))
  if (stale.length > 0 || !existsSync(to) || statSync(to).mtimeMs < newest) {
    await tool(compiler.command, [...units.map(({ object }) => object), ...flags, '-o', to])
  }
}

/** An object is fresh when the same command made it after the last change of every file that the compiler read for it. */
function isFresh (object, args) {
  const list = object.replace(/\.o$/, '.d')
  if (![object, `${object}.args`, list].every(file => existsSync(file))) return false
  if (readFileSync(`${object}.args`, 'utf8') !== args.join('\n')) return false
  const made = statSync(object).mtimeMs
  const files = readFileSync(list, 'utf8').replace(/^[^:]*:/, '').split(/[\s\\]+/).filter(file => file !== '')
  return files.every(file => existsSync(file) && statSync(file).mtimeMs < made)
}

function includeFolder (name) {
  try {
    return dirname(createRequire(import.meta.url).resolve(name === 'node-addon-api' ? `${name}/napi.h` : `${name}/include/node_api.h`))
  } catch {
    throw new Error(`${name} is not installed: run "npm ci" first`)
  }
}

// --- both

/** build/<name>, emptied when it was made by another compiler, in another place or the other way. */
function buildFolder (name) {
  const folder = join('build', generator === undefined ? `${name}-plain` : name)
  const made = JSON.stringify([root, compiler, generator ?? null])
  const mark = join(folder, 'made-by.json')
  if (existsSync(folder) && (!existsSync(mark) || readFileSync(mark, 'utf8') !== made)) rmSync(folder, { recursive: true })
  mkdirSync(folder, { recursive: true })
  writeFileSync(mark, made)
  return folder
}

function sources (folder) {
  return readdirSync(join('native', folder)).filter(file => file.endsWith('.cc')).sort().map(file => join('native', folder, file))
}

/** Tries the binary in a process of its own, then puts it in place by a rename: a running process keeps the file it has loaded. */
function publish (from, to) {
  if (existsSync(to) && statSync(to).mtimeMs >= statSync(from).mtimeMs) return false
  const script = `const addon = require(${JSON.stringify(join(root, from))}); if (addon.isas().length === 0) process.exit(1)`
  const tried = spawnSync(process.execPath, ['-e', script], { encoding: 'utf8', env: { ...process.env, LD_BIND_NOW: '1' } })
  if (tried.status !== 0) throw new Error(`${from} was built but does not load:\n${tried.stderr}`)
  mkdirSync(dirname(to), { recursive: true })
  const temporary = `${to}.${process.pid}`
  copyFileSync(from, temporary)
  renameSync(temporary, to)
  return true
}

function findCompiler () {
  const candidates = process.env.CXX ? [process.env.CXX] : ['g++', 'c++', 'clang++']
  for (const command of candidates) {
    const text = output(command, ['--version'])
    if (text === '') continue
    const clang = /clang/.test(text)
    const version = output(command, clang ? ['-dumpversion'] : ['-dumpfullversion']).trim()
    const least = clang ? MIN_CLANG : MIN_GCC
    if (Number.parseInt(version) >= least) return { command, version, clang }
    fail(`${command} is version ${version}, but refit needs ${clang ? 'clang++' : 'g++'} >= ${least} for C++20; install a newer one or name it in CXX`)
  }
  return fail(`no C++ compiler found (looked for ${candidates.join(', ')}): install g++ >= ${MIN_GCC} (${INSTALL})`)
}

function output (command, args) {
  const { status, stdout } = spawnSync(command, args, { encoding: 'utf8' })
  return status === 0 ? stdout : ''
}

/** Runs a tool; what it says is shown when it fails. */
async function tool (command, args) {
  if (options.verbose) console.log([command, ...args].join(' '))
  const child = spawn(command, args, { stdio: ['ignore', 'pipe', 'pipe'] })
  const said = []
  for (const stream of [child.stdout, child.stderr]) {
    stream.on('data', chunk => options.verbose ? process.stderr.write(chunk) : said.push(chunk))
  }
  const code = await new Promise((resolve, reject) => child.on('error', reject).on('close', resolve))
  if (code !== 0) throw new Error(`${Buffer.concat(said).toString()}${relative(root, command) || command} failed (exit ${code})`)
}

/** One build at a time in a checkout: tests and `npm ci` may start one each. A lock whose process is gone is taken over. */
function lock (file) {
  mkdirSync(dirname(file), { recursive: true })
  for (let waited = 0; ; waited++) {
    try {
      writeFileSync(file, String(process.pid), { flag: 'wx' })
      process.once('exit', () => rmSync(file, { force: true }))
      return () => rmSync(file, { force: true })
    } catch (error) {
      if (error.code !== 'EEXIST') throw error
    }
    if (!isAlive(file)) rmSync(file, { force: true })
    else if (waited === 0) say('another build is running, waiting for it')
    else if (waited > 6000) fail(`${file} has been held for ten minutes: end that build, or remove the file`)
    Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 100)
  }
}

function isAlive (file) {
  try {
    process.kill(Number(readFileSync(file, 'utf8')), 0)
    return true
  } catch (error) {
    return error.code === 'EPERM'
  }
}

function say (message) {
  console.log(`refit: ${message}`)
}

function fail (message) {
  console.error(`refit: ${message}`)
  process.exit(1)
}
