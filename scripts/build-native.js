import { spawn, spawnSync } from 'node:child_process'
import {
  copyFileSync,
  existsSync,
  mkdirSync,
  readFileSync,
  readdirSync,
  renameSync,
  rmSync,
  statSync,
  writeFileSync
} from 'node:fs'
import { createRequire } from 'node:module'
import { basename, dirname, join, relative, resolve } from 'node:path'
import { fileURLToPath } from 'node:url'
import { parseArgs } from 'node:util'
import { lock } from './build-lock.js'

// Builds the native addon into prebuilds/<platform>-<arch>/refit.node. With CMake where it is installed, else with the compiler
// alone: the same files and the same flags (a test compares the two).
//   --faults    also, for tests: build/faults/refit.node, whose fault points they can arm, and build/stand-in/librefit_cuda.so,
//               which opens shared memory in place of a card's
//   --tests     instead builds and runs native/test/*_test.cc under the address and undefined-behaviour sanitizers (or --sanitize)
//   --tsan      instead builds and runs what has threads, and needs no kernel, under the thread sanitizer
//   --no-cmake  the second way, even where CMake is installed
//   --commands  only prints the second way's compile commands, one JSON array a line
//   --cuda      only builds the CUDA library, prebuilds/<platform>-<arch>/librefit_cuda.so
//   --cuda-tests  only builds the test and bench programs of the cards into build/cuda/programs
//   --verbose   shows what the tools say
//
// Without --cuda the CUDA library is built too where nvcc, CMake and a GPU are there, or with REFIT_CUDA=1; never with REFIT_CUDA=0.
// REFIT_CUDA_ARCHS chooses the cards that it has kernels for: "90", "80;90", or "release"; the default is the cards of this machine.

const PARALLEL = 2
const MIN_GCC = 11
const MIN_CLANG = 14
const INSTALL = 'on Debian or Ubuntu: apt-get install -y g++ cmake'
const CUDA_SOURCES = join('native', 'cuda')
const STAND_IN = join('native', 'test', 'ipc_stand_in.cc')
/** What it has of the CUDA library: process groups, but for their cards. */
const STAND_IN_CUDA = [
  'dynamic',
  'group',
  'group_channel',
  'group_library',
  'group_receive',
  'group_weights',
  'group_messages',
  'nccl',
  'nccl_api'
]
  .map(name => join(CUDA_SOURCES, `${name}.cc`))
/** Programs of threads: of native/test, and groups of NCCL against a library whose ranks are threads. */
const THREADED = ['gloo', 'gloo_faults', 'ipc', 'pool', 'store', 'write'].map(name =>
  join('native', 'test', `${name}_test.cc`)
)
const GROUP_LIFE = ['group_life', 'group_bytes'].map(name => join('native', 'test', 'gpu', `${name}.cc`))
const LOOP = join('native', 'test', 'nccl_loop.cc')
/** Every kind of card that a published build serves, and PTX of the newest for those to come. */
const RELEASE_ARCHS = ['80', '90', '100', '120']

const root = join(dirname(fileURLToPath(import.meta.url)), '..')
process.chdir(root)
const options = readOptions()
const tests = options.tests || options.sanitize || options.tsan
const sanitizers = options.tsan ? 'thread' : 'address,undefined'
const started = Date.now()

if (process.platform !== 'linux' || !['x64', 'arm64'].includes(process.arch)) {
  fail(
    `refit runs on Linux (x64 or arm64), this is ${process.platform} ${process.arch}: use a container or a virtual machine with Linux`
  )
}
const compiler = findCompiler()
if (options.commands) {
  for (
    const { args } of [
      ...kernelUnits('.'),
      ...coreUnits('.', false),
      ...coreUnits('.', true),
      ...bindingUnits('.', false),
      ...bindingUnits('.', true),
      ...standInUnits('.')
    ]
  ) {
    console.log(JSON.stringify(args))
  }
  process.exit(0)
}
const generator = options['no-cmake'] ? undefined : findGenerator()
const unlock = lock(
  join(
    'build',
    options.cuda || options['cuda-tests']
      ? 'native-cuda.lock'
      : options.tsan
      ? 'native-tsan.lock'
      : tests
      ? 'native-tests.lock'
      : 'native.lock'
  )
)
try {
  if (options.cuda || options['cuda-tests']) await buildCuda()
  else if (options.tsan) await runThreaded()
  else if (tests) await runTests()
  else {
    await buildAddons()
    await buildCudaIfWanted()
  }
} catch (error) {
  unlock()
  fail(error.message)
}
unlock()

function readOptions () {
  const names = ['faults', 'tests', 'sanitize', 'tsan', 'no-cmake', 'commands', 'cuda', 'cuda-tests', 'verbose']
  try {
    return parseArgs({ options: Object.fromEntries(names.map(name => [name, { type: 'boolean' }])) }).values
  } catch {
    return fail(
      `unknown argument in "${process.argv.slice(2).join(' ')}": expected any of ${
        names
          .map(name => `--${name}`)
          .join(' ')
      }`
    )
  }
}

async function buildAddons () {
  const wanted = [{
    target: 'refit_node',
    file: 'refit.node',
    faults: false,
    to: join('prebuilds', `${process.platform}-${process.arch}`)
  }]
  if (options.faults) {
    wanted.push({ target: 'refit_faults_node', file: 'refit-faults.node', faults: true, to: join('build', 'faults') })
  }
  const standIn = options.faults && existsSync(STAND_IN) ? 'refit-stand-in.so' : undefined
  const folder = buildFolder('native')
  if (generator !== undefined) {
    await cmake(folder, [], [...wanted.map(addon => addon.target), ...standIn === undefined ? [] : ['refit_stand_in']])
  } else {
    for (const addon of wanted) await plainAddon(folder, addon)
    if (standIn !== undefined) await plainStandIn(folder, standIn)
  }
  for (const addon of wanted) {
    const to = join(addon.to, 'refit.node')
    const changed = publish(join(folder, addon.file), to)
    say(`${to} ${changed ? `built in ${((Date.now() - started) / 1000).toFixed(1)} s` : 'is up to date'}`)
  }
  if (standIn !== undefined) publishStandIn(join(folder, standIn))
}

/** Of one build with the addon that opens it: they agree about what crosses, or the tests say that they do not. */
function publishStandIn (file) {
  const to = join('build', 'stand-in', 'librefit_cuda.so')
  const changed = publish(file, to, tryCuda)
  say(`${to} ${changed ? 'built' : 'is up to date'}`)
}

async function runTests () {
  const folder = buildFolder('native-tests')
  if (generator !== undefined) await cmake(folder, ['-DREFIT_TESTS=ON', '-DREFIT_SANITIZE=ON'], [])
  else await plainTests(folder)
  const names = sources('test').filter(file => file.endsWith('_test.cc')).map(file => basename(file, '.cc'))
  if (names.length === 0) throw new Error('native/test has no *_test.cc')
  const failed = names.filter(name => spawnSync(join(folder, name), { stdio: 'inherit' }).status !== 0)
  if (failed.length > 0) throw new Error(`${failed.join(', ')} failed`)
  say(
    `${names.length} native test programs passed under ASan and UBSan in ${
      ((Date.now() - started) / 1000).toFixed(1)
    } s`
  )
}

/** Compiled without CMake: few files, and none of the kernels, which take longest. */
async function runThreaded () {
  const folder = buildFolder('native-tsan')
  const core = coreUnits(folder, true)
  const programs = [...THREADED.map(file => ({ name: basename(file, '.cc'), files: [file] })), {
    name: 'group_life',
    files: [...GROUP_LIFE, ...STAND_IN_CUDA]
  }]
  for (const { name, files } of programs) {
    await link(join(folder, name), [
      ...core,
      ...files.map(file => unit(join(folder, 'test'), file, ['-DREFIT_FAULTS']))
    ], ['-fsanitize=thread', '-pthread', '-ldl'])
  }
  const loop = join(folder, 'loop.so')
  await link(loop, [unit(join(folder, 'test'), LOOP, [])], ['-fsanitize=thread', '-shared', '-pthread'])
  const env = { ...process.env, TSAN_OPTIONS: `suppressions=${join(root, 'native', 'test', 'tsan.supp')}` }
  const failed = programs.filter(({ name }) =>
    spawnSync(join(folder, name), [resolve(loop)], { stdio: 'inherit', env }).status !== 0
  )
  if (failed.length > 0) throw new Error(`${failed.map(({ name }) => name).join(', ')} failed`)
  say(`${programs.length} native test programs passed under TSan in ${((Date.now() - started) / 1000).toFixed(1)} s`)
}

// --- the CUDA library

/** Where it is not asked for, a machine that cannot build it still gets the engine for its CPU. */
async function buildCudaIfWanted () {
  const wanted = process.env.REFIT_CUDA ?? ''
  if (!existsSync(join(CUDA_SOURCES, 'CMakeLists.txt'))) return
  if (wanted === '0') return say('no CUDA library: REFIT_CUDA=0')
  if (wanted !== '' && wanted !== '1') throw new Error(`REFIT_CUDA: expected 1 or 0, got "${wanted}"`)
  if (wanted === '1') return buildCuda()
  const missing = !['/dev/nvidiactl', '/proc/driver/nvidia'].some(path => existsSync(path))
    ? 'there is no NVIDIA GPU here'
    : findNvcc() === undefined
    ? 'there is no nvcc'
    : generator === undefined
    ? 'there is no CMake >= 3.18'
    : undefined
  if (missing !== undefined) return say(`no CUDA library: ${missing} (REFIT_CUDA=1 insists on building it)`)
  try {
    await buildCuda()
  } catch (error) {
    console.error(`${error.message}\nrefit: the CUDA library was not built (see above); the CPU engine was`)
  }
}

async function buildCuda () {
  const nvcc = findNvcc()
  if (nvcc === undefined) {
    throw new Error(
      'the CUDA library needs nvcc: install the CUDA toolkit (12.8 or newer), or say in CUDA_HOME where it is'
    )
  }
  if (generator === undefined) throw new Error(`the CUDA library needs CMake >= 3.18 and make or ninja (${INSTALL})`)
  const archs = cudaArchs()
  const folder = buildFolder('cuda')
  const tests = options['cuda-tests']
  await cmake(
    folder,
    [
      `-DCMAKE_CUDA_COMPILER=${nvcc}`,
      `-DCMAKE_CUDA_HOST_COMPILER=${compiler.command}`,
      `-DCMAKE_CUDA_ARCHITECTURES=${archs}`
    ],
    [...options.cuda || !tests ? ['refit_cuda'] : [], ...tests ? ['cuda_tests'] : []],
    CUDA_SOURCES
  )
  const seconds = ((Date.now() - started) / 1000).toFixed(1)
  if (tests) say(`${join(folder, 'programs')} built for ${archs} in ${seconds} s`)
  if (tests && !options.cuda) return
  const to = join('prebuilds', `${process.platform}-${process.arch}`, 'librefit_cuda.so')
  const changed = publish(join(folder, 'librefit_cuda.so'), to, tryCuda)
  say(`${to} ${changed ? `built for ${archs} in ${seconds} s` : 'is up to date'}`)
}

function findNvcc () {
  const candidates = [
    process.env.CUDA_HOME && join(process.env.CUDA_HOME, 'bin', 'nvcc'),
    'nvcc',
    '/usr/local/cuda/bin/nvcc'
  ]
  return candidates.find(command => command && output(command, ['--version']) !== '')
}

/** CMake's names: "90-real" has code for one kind of card, "120" PTX as well. */
function cudaArchs () {
  const wanted = process.env.REFIT_CUDA_ARCHS ?? ''
  if (wanted === 'release') {
    return [...RELEASE_ARCHS.slice(0, -1).map(arch => `${arch}-real`), RELEASE_ARCHS.at(-1)].join(';')
  }
  const archs = wanted !== ''
    ? wanted.split(/[;, ]+/).filter(arch => arch !== '')
    : output('nvidia-smi', ['--query-gpu=compute_cap', '--format=csv,noheader'])
      .split('\n')
      .map(line => line.trim().replace('.', ''))
      .filter(arch => /^\d+$/.test(arch))
  const bad = archs.find(arch => !/^\d{2,3}$/.test(arch) || Number(arch) < 80)
  if (bad !== undefined) {
    throw new Error(
      `REFIT_CUDA_ARCHS: expected compute capabilities of 80 or more, like "90" or "80;90;100;120", or "release"; got "${bad}"`
    )
  }
  return [...new Set(archs.length === 0 ? ['90'] : archs)]
    .sort((a, b) => Number(a) - Number(b))
    .map(arch => `${arch}-real`)
    .join(';')
}

/** The library must open where there is no driver, and say so. */
function tryCuda (file) {
  const addon = join(root, 'prebuilds', `${process.platform}-${process.arch}`, 'refit.node')
  if (!existsSync(addon)) return { status: 0 }
  const script = `const { runtimeCuda, error } = require(${
    JSON.stringify(addon)
  }).cudaGpus(); if (runtimeCuda === '') { console.error(error); process.exit(1) }`
  return spawnSync(process.execPath, ['-e', script], {
    encoding: 'utf8',
    env: { ...process.env, REFIT_CUDA_LIBRARY: file }
  })
}

// --- with CMake

async function cmake (folder, flags, targets, from = 'native') {
  const configure = ['-S', from, '-B', folder, '-G', generator, `-DCMAKE_CXX_COMPILER=${compiler.command}`, ...flags]
  // Configured again only for other settings: it takes seconds.
  const settings = join(folder, 'configured.json')
  const same = existsSync(join(folder, 'CMakeCache.txt')) && existsSync(settings) &&
    readFileSync(settings, 'utf8') === JSON.stringify(configure)
  if (!same) {
    await tool('cmake', configure)
    writeFileSync(settings, JSON.stringify(configure))
  }
  await tool('cmake', [
    '--build',
    folder,
    '--parallel',
    String(PARALLEL),
    ...targets.flatMap(target => ['--target', target])
  ])
}

/** The generator to use, or undefined where CMake, or every tool that it could drive, is missing or too old. */
function findGenerator () {
  const version = /version (\d+)\.(\d+)/.exec(output('cmake', ['--version']))
  if (version === null || Number(version[1]) < 3 || (Number(version[1]) === 3 && Number(version[2]) < 16)) {
    return undefined
  }
  if (output('make', ['--version']) !== '') return 'Unix Makefiles'
  return output('ninja', ['--version']) !== '' ? 'Ninja' : undefined
}

// --- with the compiler alone: native/CMakeLists.txt and native/cpu/sources.cmake, said again

/** Flags of every unit. */
function commonFlags () {
  return [
    ...tests ? [] : ['-O3', '-DNDEBUG'],
    '-std=c++20',
    '-fPIC',
    '-Wall',
    '-Wextra',
    '-fno-math-errno',
    '-fvisibility=hidden',
    ...compiler.clang ? [] : ['-Wno-restrict'],
    ...tests
      ? [
        '-O1',
        '-g',
        '-fno-omit-frame-pointer',
        `-fsanitize=${sanitizers}`,
        ...options.tsan ? [] : ['-fno-sanitize-recover=all']
      ]
      : [],
    '-Inative'
  ]
}

/** Flags of the units that hold one instruction set each. */
function isaFlags (source) {
  const isa = /_(scalar|avx2|avx512|avx512bf16)\.cc$/.exec(source)?.[1]
  if (isa === undefined) return []
  if (isa === 'scalar') return ['-ffp-contract=off']
  if (isa === 'avx2') return ['-ffp-contract=off', '-mavx2', '-mfma']
  return [
    '-ffp-contract=off',
    '-mavx512f',
    '-mavx512bw',
    '-mavx512dq',
    '-mavx512vl',
    '-mfma',
    ...compiler.clang ? [] : ['-Wno-uninitialized', '-Wno-maybe-uninitialized'],
    ...isa === 'avx512bf16' ? ['-mavx512bf16'] : []
  ]
}

function kernelUnits (folder) {
  const files = sources('cpu').filter(file => process.arch === 'x64' || !/_avx\w+\.cc$/.test(file))
  return files.map(file => unit(join(folder, 'kernels'), file, isaFlags(file)))
}

function coreUnits (folder, faults) {
  const define = faults ? ['-DREFIT_FAULTS'] : []
  return [...sources('core'), ...sources('transport')].map(file =>
    unit(join(folder, faults ? 'core-faults' : 'core'), file, define)
  )
}

function bindingUnits (folder, faults) {
  const flags = [
    '-DNAPI_VERSION=9',
    ...faults ? ['-DREFIT_FAULTS'] : [],
    ...['node-addon-api', 'node-api-headers'].flatMap(name => ['-isystem', includeFolder(name)])
  ]
  return sources('binding').map(file => unit(join(folder, faults ? 'binding-faults' : 'binding'), file, flags))
}

async function plainAddon (folder, { file, faults }) {
  await link(join(folder, file), [
    ...kernelUnits(folder),
    ...coreUnits(folder, faults),
    ...bindingUnits(folder, faults)
  ], [
    '-shared',
    '-static-libstdc++',
    '-static-libgcc',
    '-Wl,-z,nodelete',
    '-Wl,--version-script=native/binding/exports.map',
    '-pthread',
    '-ldl'
  ])
}

function standInUnits (folder) {
  return existsSync(STAND_IN)
    ? [STAND_IN, ...STAND_IN_CUDA].map(file => unit(join(folder, 'stand-in'), file, ['-DREFIT_FAULTS']))
    : []
}

async function plainStandIn (folder, file) {
  await link(join(folder, file), [...kernelUnits(folder), ...coreUnits(folder, true), ...standInUnits(folder)], [
    '-shared',
    '-static-libstdc++',
    '-static-libgcc',
    '-Wl,-z,nodelete',
    '-pthread',
    '-ldl'
  ])
}

async function plainTests (folder) {
  const shared = [...kernelUnits(folder), ...coreUnits(folder, true)]
  for (const source of sources('test').filter(file => file.endsWith('_test.cc'))) {
    await link(join(folder, basename(source, '.cc')), [
      ...shared,
      unit(join(folder, 'test'), source, ['-DREFIT_FAULTS'])
    ], ['-fsanitize=address,undefined', '-pthread', '-ldl'])
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
    return dirname(
      createRequire(import.meta.url).resolve(
        name === 'node-addon-api' ? `${name}/napi.h` : `${name}/include/node_api.h`
      )
    )
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
  if (existsSync(folder) && (!existsSync(mark) || readFileSync(mark, 'utf8') !== made)) {
    rmSync(folder, { recursive: true })
  }
  mkdirSync(folder, { recursive: true })
  writeFileSync(mark, made)
  return folder
}

function sources (folder) {
  return readdirSync(join('native', folder)).filter(file => file.endsWith('.cc')).sort().map(file =>
    join('native', folder, file)
  )
}

function tryAddon (file) {
  const script = `const addon = require(${JSON.stringify(file)}); if (addon.isas().length === 0) process.exit(1)`
  return spawnSync(process.execPath, ['-e', script], { encoding: 'utf8', env: { ...process.env, LD_BIND_NOW: '1' } })
}

/** Tries the binary in a process of its own, then puts it in place by a rename: a running process keeps the file it has loaded. */
function publish (from, to, trial = tryAddon) {
  if (existsSync(to) && statSync(to).mtimeMs >= statSync(from).mtimeMs) return false
  const tried = trial(join(root, from))
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
    fail(
      `${command} is version ${version}, but refit needs ${
        clang ? 'clang++' : 'g++'
      } >= ${least} for C++20; install a newer one or name it in CXX`
    )
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
  if (code !== 0) {
    throw new Error(`${Buffer.concat(said).toString()}${relative(root, command) || command} failed (exit ${code})`)
  }
}

/** One build of a kind at a time in a checkout: tests and `npm ci` may start one each. A lock whose process is gone is taken over. */
function say (message) {
  console.log(`refit: ${message}`)
}

function fail (message) {
  console.error(`refit: ${message}`)
  process.exit(1)
}
