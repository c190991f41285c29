import { spawnSync } from 'node:child_process'
import { existsSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import { MEMORY_TAGS } from '../../src/native/addon.ts'
import { cudaLibraryPath, native } from '../../src/native/load-addon.ts'
import type { CoreConfig } from '../../src/native/core-config.ts'
import { ROW_INTS } from '../../src/native/step.ts'
import type { StepBatch } from '../../src/native/step.ts'
import { packageRoot } from '../../src/root.ts'
import { plainModel } from './helpers/plain-core.ts'
import { configSource, runAlone } from './helpers/run-script.ts'
import { runStep } from './helpers/run-step.ts'

// The boundary between the addon and the CUDA library. Most tests use a library whose device returns its arguments; the
// real library is tested as far as possible without a GPU.

const addon = native()
const real = cudaLibraryPath()
const folder = t.testdir()
const { config: plain } = plainModel()
const config: CoreConfig = { ...plain, device: 'cuda', pages: 64 }
const cure = 'build it with "node scripts/build-native.js --cuda" (it needs nvcc of CUDA 12.8 or newer and CMake), ' +
  'or name one in REFIT_CUDA_LIBRARY'

function compile (name: string, flags: string[] = []): string {
  const to = join(folder, name)
  const { status, stderr } = spawnSync(process.env.CXX ?? 'g++', [
    '-std=c++20',
    '-O1',
    '-shared',
    '-fPIC',
    '-fvisibility=hidden',
    '-I',
    join(packageRoot, 'native'),
    ...flags,
    join(packageRoot, 'native/test/echo_device.cc'),
    '-o',
    to
  ], { encoding: 'utf8' })
  t.equal(status, 0, stderr)
  return to
}

function batchOf (tokens: number[], rows: number): StepBatch {
  return {
    tokens: Int32Array.from(tokens),
    seqOffsets: Int32Array.of(0, tokens.length),
    startPos: Int32Array.of(0),
    pageOffsets: Int32Array.of(0, 2),
    pages: Int32Array.of(5, 9),
    rowInts: new Int32Array(ROW_INTS * rows),
    rowFloats: Float32Array.from({ length: 6 * rows }, (_, i) => i / 4),
    rowSeeds: BigUint64Array.from({ length: rows }, (_, i) => BigInt(i + 3)),
    historyOffsets: new Int32Array(rows + 1),
    history: new Int32Array(),
    biasOffsets: new Int32Array(rows + 1),
    biasTokens: Int32Array.of(1),
    biasValues: Float32Array.of(-0.5),
    idOffsets: new Int32Array(rows + 1),
    ids: new Int32Array(),
    masks: new Uint32Array(),
    adapters: new Int32Array(0)
  }
}

t.test('a missing, invalid or mismatched library is an error with its path and advice', t => {
  const text = join(folder, 'text.so')
  writeFileSync(text, 'not a library')
  const other = join(folder, 'other.so')
  writeFileSync(join(folder, 'other.c'), 'int unrelated;')
  spawnSync('cc', ['-shared', '-fPIC', join(folder, 'other.c'), '-o', other])
  const cases: Array<[string, RegExp | string]> = [
    ['/nowhere/librefit_cuda.so', `CUDA: /nowhere/librefit_cuda.so does not exist or cannot be read: ${cure}`],
    [text, /^CUDA: .*text\.so does not open: .*(invalid ELF header|file too short)/],
    [other, `CUDA: ${other} is not refit's CUDA library: ${cure}`],
    [
      compile('version.so', ['-DOTHER_VERSION']),
      /version\.so was built from other sources than the addon \(its interface is \d+, expected \d+\): build it/
    ],
    [
      compile('layout.so', ['-DOTHER_LAYOUT']),
      /layout\.so was built from other sources than the addon \(the layout of its data differs\): build it/
    ]
  ]
  for (const [path, message] of cases) {
    process.env.REFIT_CUDA_LIBRARY = path
    t.equal(cudaLibraryPath(), path)
    t.throws(() => addon.createCore(config), { message })
    t.throws(() => addon.cudaMemoryNeeds(config), { message })
    const found = addon.cudaGpus()
    t.match(found.error, message)
    t.strictSame({ ...found, error: '' }, {
      error: '',
      driverCuda: '',
      runtimeCuda: '',
      driverVersion: '',
      architectures: '',
      gpus: [],
      peerAccess: [],
      libraries: []
    })
  }
  t.end()
})

t.test('the library lies next to the addon unless another is named', t => {
  delete process.env.REFIT_CUDA_LIBRARY
  t.equal(cudaLibraryPath(), join(packageRoot, `prebuilds/linux-${process.arch}/librefit_cuda.so`))
  if (!existsSync(cudaLibraryPath())) t.match(addon.cudaGpus().error, `CUDA: ${cudaLibraryPath()} does not exist`)
  t.end()
})

t.test('float16 opens a library of its own beside the other', t => {
  const half: CoreConfig = { ...config, dtype: 'float16', params: config.params.map(p => ({ ...p, dtype: 'float16' })) }
  process.env.REFIT_CUDA_LIBRARY = '/nowhere/librefit_cuda.so'
  const missing = `CUDA: /nowhere/librefit_cuda_fp16.so does not exist or cannot be read: ${cure}`
  t.throws(() => addon.createCore(half), { message: missing })
  t.throws(() => addon.cudaMemoryNeeds(half), { message: missing })
  process.env.REFIT_CUDA_LIBRARY = join(folder, 'half.so')
  compile('half_fp16.so')
  t.ok(addon.cudaMemoryNeeds(half).weightBytes > 0)
  const core = addon.createCore(half)
  t.throws(() => addon.createCore(config), { message: /half\.so does not exist/ })
  addon.closeCore(core)
  t.end()
})

t.test('all data crosses the boundary unchanged', async t => {
  process.env.REFIT_CUDA_LIBRARY = compile('echo.so')
  t.strictSame(addon.cudaGpus(), {
    driverCuda: '13.0',
    runtimeCuda: '13.1',
    driverVersion: '580.1.2',
    architectures: '90',
    gpus: [
      {
        ordinal: 0,
        name: 'first',
        uuid: 'GPU-0',
        pciBusId: '0000:01:00.0',
        computeCapability: '9.0',
        multiprocessors: 132,
        totalBytes: 80 * 2 ** 30,
        freeBytes: 5,
        virtualMemory: true,
        integrated: false
      },
      {
        ordinal: 1,
        name: 'second',
        uuid: 'GPU-1',
        pciBusId: '0000:02:00.0',
        computeCapability: '7.5',
        multiprocessors: 40,
        totalBytes: 7,
        freeBytes: 6,
        virtualMemory: false,
        integrated: true,
        error: 'too old'
      }
    ],
    peerAccess: [[true, false], [true, true]],
    libraries: [{ name: 'cuBLASLt', path: '/a/libcublasLt.so.13', version: '13.1.0' }, {
      name: 'NCCL',
      tried: 'libnccl.so.2: not there'
    }]
  })
  t.strictSame(addon.cudaMemoryNeeds(config), {
    weightBytes: 2 ** 40,
    spareBytes: 5,
    kvBytes: 64,
    scratchBytes: 3,
    fixedBytes: 4
  })

  const ranks2 = { ...plainModel({ ranks: 2 }).config, device: 'cuda' as const, pages: 64 }
  const core = addon.createCore({
    ...ranks2,
    gpus: [3, 1],
    shareGpus: true,
    watchdogSeconds: 2.5,
    graphs: false,
    maxStepTokens: 7,
    maxStepSequences: 8,
    maxContext: 9,
    recordExperts: true
  })
  const { addresses, ...info } = addon.coreInfo(core)
  t.strictSame(info, {
    isa: 'GPUs 3 1 shared experts eager watchdog 2.500000',
    threads: 2,
    weightBytes: 7,
    kvBytes: 8000009,
    spareBytes: 0
  })
  t.strictSame([...addresses.slice(0, 2), addresses.at(-1)], [0n, 1n, 1007n])
  t.strictSame(runStep(addon, core, batchOf([4, 3, 2], 2)), {
    tokens: Int32Array.of(4, 3, 2),
    logprobs: Float32Array.from({ length: 12 }, (_, i) => i / 4),
    topIds: Int32Array.of(5, 9),
    topLogprobs: Float32Array.of(-0.5),
    idLogprobs: Float32Array.of(3, 4),
    keptCounts: new Int32Array(0),
    keptLogprobs: new Float32Array(0),
    keptIds: new Int32Array(0),
    experts: Uint16Array.of(7, 65535)
  })
  const outcome = await addon.write(core, {
    sources: [{ buffer: Uint8Array.of(200, ...new Array(255).fill(0)) }],
    tensors: Float64Array.of(0, 0, 1, 64, 1, 2, 2),
    rects: Float64Array.of(0, 1, 7, 0, 0, 64, 1, 0, 0)
  })
  t.strictSame(outcome, {
    states: Uint8Array.of(1),
    bytes: 202,
    segmentsOpened: 0,
    segmentsClosed: 60000,
    error: { message: '1 rectangles', tensor: 0 }
  })
  const segment = { uuid: 'GPU-7', handle: new Uint8Array(64), events: new Uint8Array(128), keep: 'pool' }
  const blocks = {
    uuid: 'GPU-8',
    handle: { blockBytes: 4096, fds: [0, 1], fabric: new Uint8Array() },
    events: new Uint8Array()
  }
  const shared = await addon.write(core, {
    sources: [{ segment }, { segment: blocks }],
    tensors: Float64Array.of(1, 0, 1, 64, 1, 2, 2),
    rects: Float64Array.of(0, 1, 7, 0, 0, 64, 1, 0, 0),
    eventTimeoutMs: 7
  })
  t.strictSame(shared, {
    states: Uint8Array.of(1),
    bytes: 2,
    segmentsOpened: 2,
    segmentsClosed: 7,
    warning: 'left open',
    error: { message: '1 rectangles, GPU-7 pool 64 0 0 0 128, GPU-8  0 4096 2 0 0', tensor: 0 }
  })
  t.equal(await addon.closeMappings(core, 'pool'), 2 ** 40 + 4)
  t.strictSame(await addon.fetch(core, { segment }, 2, 3, 5), Uint8Array.of(71, 72, 73))
  t.strictSame(await addon.read(core, 1, 2, 3, 4, 1, 2), Uint8Array.of(127, 128, 129, 130))
  t.strictSame(
    await addon.checksum(core, Float64Array.of(0, 1, 7, 0, 0, 64, 1, 0, 0), Float64Array.of(1)),
    BigUint64Array.of(2n ** 63n + 1001n)
  )
  t.equal(await addon.release(core, MEMORY_TAGS.weights | MEMORY_TAGS.cuda_graph, true), 2 ** 40 + 51)
  t.equal(await addon.release(core, MEMORY_TAGS.kv_cache, false), 2 ** 40 + 20)
  t.equal(await addon.resume(core, MEMORY_TAGS.weights), true)
  t.equal(await addon.resume(core, MEMORY_TAGS.kv_cache), false)
  addon.closeCore(core)
  const empty = addon.createCore({ ...config })
  t.match(addon.coreInfo(empty).isa, /^GPUs watchdog 0\.0/)
  addon.closeCore(empty)
})

t.test('every failure of the library has the error code of its kind', async t => {
  const failures: Array<[number, { message: string | RegExp, code: string | undefined }]> = [
    [1, { message: 'rank 1 (GPU-1, GPU 1) is lost', code: 'DEVICE_LOST' }],
    [2, { message: 'GPU 0 is full', code: 'NO_MEMORY' }],
    [3, { message: 'not enough host memory', code: 'NO_MEMORY' }],
    [4, { message: 'malformed', code: undefined }],
    [5, { message: /^x{8191}$/, code: undefined }],
    [6, { message: 'a native exception was thrown in the CUDA library', code: undefined }]
  ]
  const core = addon.createCore(config)
  for (const [how, { message, code }] of failures) {
    const expected = (error: unknown, from: string): void => {
      t.ok(error instanceof Error, from)
      t.match((error as Error).message, message, from)
      t.equal((error as NodeJS.ErrnoException).code, code, from)
    }
    const thrown = (fn: () => unknown): unknown => {
      try {
        return fn()
      } catch (error) {
        return error
      }
    }
    expected(thrown(() => addon.createCore({ ...config, pages: how })), 'createCore')
    expected(thrown(() => runStep(addon, core, batchOf([how], 0))), 'step')
    expected(await addon.scramble(core, BigInt(how)).catch((error: unknown) => error), 'scramble')
  }
  await t.rejects(addon.release(core, 0, false), { message: 'GPU 0 is full', code: 'NO_MEMORY' })
  t.throws(() => addon.cudaMemoryNeeds({ ...config, dtype: 'float32' }), { message: 'malformed' })
  addon.closeCore(core)
})

t.test('fields of GPUs are checked before the library sees them', t => {
  const bad: Array<[Record<string, unknown>, string]> = [
    [{ device: 'tpu' }, 'config.device: expected "cpu" or "cuda", got "tpu"'],
    [{ gpus: 1 }, 'config.gpus: expected an array, got 1'],
    [{ gpus: [0, -1] }, 'config.gpus[1]: expected an integer from 0 to 1023, got -1'],
    [{ shareGpus: 1 }, 'config.shareGpus: expected a boolean, got 1'],
    [{ graphs: 0 }, 'config.graphs: expected a boolean, got 0'],
    [{ watchdogSeconds: 0 }, 'config.watchdogSeconds: expected more than 0, got 0'],
    [{ watchdogSeconds: Infinity }, 'config.watchdogSeconds: expected a finite number, got Infinity'],
    [{ maxStepTokens: 0 }, 'config.maxStepTokens: expected an integer from 1 to 2147483647, got 0'],
    [{ maxStepSequences: 1.5 }, 'config.maxStepSequences: expected an integer from 1 to 2147483647, got 1.5'],
    [{ maxContext: '8' }, 'config.maxContext: expected an integer, got "8"']
  ]
  for (const [change, message] of bad) {
    t.throws(() => addon.createCore({ ...config, ...change } as CoreConfig), { message })
  }
  const core = addon.createCore(config)
  t.throws(() => addon.release(core, 8, false), { message: 'tags: expected an integer from 0 to 7, got 8' })
  t.throws(() => addon.release(core, 1, undefined as unknown as boolean), {
    message: 'keepWeights: expected a boolean, got undefined'
  })
  t.throws(() => addon.resume(core, -1), { message: 'tags: expected an integer from 0 to 7, got -1' })
  addon.closeCore(core)
  t.end()
})

t.test('endProcess ends the process at once, without exit handlers', t => {
  const script = `process.on('exit', () => console.log('handler')); require(${
    JSON.stringify(join(packageRoot, `prebuilds/linux-${process.arch}/refit.node`))
  }).endProcess(70)`
  const { status, stdout } = spawnSync(process.execPath, ['-e', script], { encoding: 'utf8' })
  t.equal(status, 70)
  t.equal(stdout, '')
  t.end()
})

t.test('the real library opens without CUDA libraries, and reports the missing ones', {
  skip: !existsSync(real) && 'not built (scripts/build-native.js --cuda)'
}, t => {
  const script = `const { error, ...found } = require(${
    JSON.stringify(join(packageRoot, `prebuilds/linux-${process.arch}/refit.node`))
  }).cudaGpus(); console.log(JSON.stringify({ error, ...found }))`
  const { status, stdout, stderr } = spawnSync(process.execPath, ['-e', script], {
    encoding: 'utf8',
    env: { ...process.env, REFIT_CUDA_LIBRARY: real }
  })
  t.equal(status, 0, stderr)
  const found = JSON.parse(stdout) as ReturnType<typeof addon.cudaGpus>
  t.match(found.runtimeCuda, /^1[23]\.\d+$/)
  t.match(found.architectures, /^\d/)
  if (found.gpus.length === 0) {
    t.match(found.error, /NVIDIA driver|hides all GPUs|sees no GPU|CUDA cannot be started/)
  }
  // Sizes and errors of a configuration need no GPU.
  const alone = (body: string): string =>
    runAlone(
      `process.env.REFIT_CUDA_LIBRARY = ${JSON.stringify(real)}; const addon = require(${
        JSON.stringify(join(packageRoot, `prebuilds/linux-${process.arch}/refit.node`))
      }); const config = ${
        configSource(config)
      }; try { console.log(JSON.stringify(${body})) } catch (error) { console.log(error.message) }`
    )
      .stdout
      .trim()
  const plan = JSON.parse(alone('addon.cudaMemoryNeeds(config)')) as ReturnType<typeof addon.cudaMemoryNeeds>
  t.ok(plan.weightBytes >= 2 * config.params.reduce((sum, { rows, cols }) => sum + rows * cols, 0))
  t.equal(plan.kvBytes, 2 * 2 ** 20, 'rounded up to the mapping unit of a GPU')
  t.ok(plan.scratchBytes > 2 ** 20 && plan.fixedBytes > 2 ** 28)
  for (const call of ['cudaMemoryNeeds', 'createCore']) {
    t.match(
      alone(`addon.${call}({ ...config, dtype: 'float32' })`),
      /^bad configuration: this CUDA library computes in bfloat16 only, got float32/
    )
    t.match(alone(`addon.${call}({ ...config, ranks: 3 })`), 'bad configuration: heads 4 do not divide among 3 ranks')
  }
  if (found.gpus.length === 0) t.equal(alone('addon.createCore(config)'), found.error)
  const { stdout: dynamic } = spawnSync('readelf', ['-d', real], { encoding: 'utf8' })
  const needed = [...dynamic.matchAll(/NEEDED.*\[(.*)\]/g)].map(match => match[1]!)
  t.ok(needed.includes('libc.so.6'))
  t.strictSame(needed.filter(name => !/^(lib(c|m|dl|rt|pthread)\.so|ld-linux)/.test(name)), [])
  const { stdout: symbols } = spawnSync('nm', ['-D', '--defined-only', real], { encoding: 'utf8' })
  t.strictSame(symbols.trim().split('\n').map(line => line.split(' ').at(-1)), ['refit_device_library'])
  t.end()
})
