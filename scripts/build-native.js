import { existsSync } from 'node:fs'
import { dirname, join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { parseArgs } from 'node:util'
import { Build, PREBUILDS } from './native/build.js'
import { buildCuda, buildCudaIfWanted } from './native/cuda.js'
import { lock } from './native/lock.js'
import { findTools } from './native/tools.js'

// Builds the native addon into prebuilds/<platform>-<arch>/refit.node with CMake and a C++ compiler.
//   --faults      also builds for tests: build/faults/refit.node (fault points that tests can arm),
//                 build/stand-in/librefit_cuda.so (opens shared memory instead of a GPU's) and
//                 build/stand-in/nccl_loop.so (NCCL's interface, with threads as ranks)
//   --tests       instead builds and runs native/test/**/*_test.cc under the address and undefined-behaviour sanitizers
//                 (also --sanitize)
//   --program=X   instead builds one of those test programs, build/native-tests/X
//   --tsan        instead builds and runs the test programs that have threads under the thread sanitizer
//   --cuda        instead builds the CUDA libraries, prebuilds/<platform>-<arch>/librefit_cuda.so and, for float16,
//                 librefit_cuda_fp16.so
//   --cuda-tests  instead builds the GPU test and bench programs into build/cuda/programs
//   --verbose     shows the commands and their output
//
// Without these the CUDA library is built too if nvcc and a GPU are found, or if REFIT_CUDA=1; never if REFIT_CUDA=0.
// REFIT_CUDA_ARCHS chooses the GPUs that it has kernels for: "90", "80;90" or "release". Default: the GPUs of this
// machine. REFIT_CUDA_UNOPTIMIZED=1 compiles CUDA code in less time and without optimization, for machines without a
// GPU; it needs nvcc 12.9. REFIT_UNITY=0 compiles each source by itself: a rebuild after a change of one is faster.

// Several sources at a time compile in half the time, but a change of one compiles all of them again.
const UNITY = process.env.REFIT_UNITY === '0' ? ['-DREFIT_UNITY=OFF'] : []

const NAMES = ['faults', 'tests', 'sanitize', 'tsan', 'cuda', 'cuda-tests', 'verbose']

process.chdir(join(dirname(fileURLToPath(import.meta.url)), '..'))
try {
  await main(readOptions())
} catch (error) {
  console.error(`refit: ${error.message}`)
  process.exit(1)
}

async function main (options) {
  if (process.platform !== 'linux' || !['x64', 'arm64'].includes(process.arch)) {
    throw new Error(
      `refit runs on Linux (x64 or arm64), this is ${process.platform} ${process.arch}: ` +
        'use a container or a virtual machine with Linux'
    )
  }
  const build = new Build(findTools(), options.verbose === true)
  if (options.cuda || options['cuda-tests']) {
    await locked('native-cuda', () => buildCuda(build, { library: options.cuda, programs: options['cuda-tests'] }))
  } else if (options.tsan) await locked('native-tsan', () => runTests(build, 'thread'))
  else if (options.tests || options.sanitize) await locked('native-tests', () => runTests(build, 'address'))
  else if (options.program !== undefined) {
    await locked('native-tests', () => buildTests(build, 'address', [options.program]))
  } else await locked('native', () => buildAddons(build, options.faults))
}

/** One build of a kind at a time in a checkout: tests and `npm ci` may each start one. */
async function locked (name, run) {
  const unlock = lock(join('build', `${name}.lock`))
  try {
    await run()
  } finally {
    unlock()
  }
}

function readOptions () {
  try {
    const flags = Object.fromEntries(NAMES.map(name => [name, { type: 'boolean' }]))
    return parseArgs({ options: { ...flags, program: { type: 'string' } } }).values
  } catch {
    const known = [...NAMES.map(name => `--${name}`), '--program=NAME'].join(' ')
    throw new Error(`unknown argument in "${process.argv.slice(2).join(' ')}": expected any of ${known}`)
  }
}

async function buildAddons (build, faults) {
  // The stand-in is built with the addon that opens it, because the two must agree on the layout of what they exchange.
  const tests = faults && existsSync(join('native', 'test'))
  const folder = build.folder('native')
  await build.cmake(folder, UNITY, ['refit_node', ...tests ? ['refit_test_libraries'] : []])
  build.publish(join(folder, 'refit.node'), join(PREBUILDS, 'refit.node'))
  if (tests) {
    build.publish(join(folder, 'refit-faults.node'), join('build', 'faults', 'refit.node'))
    build.publish(join(folder, 'refit-stand-in.so'), join('build', 'stand-in', 'librefit_cuda.so'))
    build.publish(join(folder, 'nccl_loop.so'), join('build', 'stand-in', 'nccl_loop.so'))
  }
  await buildCudaIfWanted(build)
}

/** Builds the test programs, or those that are named; returns their folder. */
async function buildTests (build, sanitizer, programs = []) {
  const folder = build.folder(sanitizer === 'thread' ? 'native-tsan' : 'native-tests')
  await build.cmake(folder, ['-DREFIT_TESTS=ON', `-DREFIT_SANITIZE=${sanitizer}`, ...UNITY], programs)
  return folder
}

async function runTests (build, sanitizer) {
  const folder = await buildTests(build, sanitizer)
  build.ctest(folder)
  build.report(`the native tests passed under the ${sanitizer} sanitizer in ${build.seconds()} s`)
}
