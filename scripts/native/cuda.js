import { existsSync } from 'node:fs'
import { join } from 'node:path'
import { PREBUILDS } from './build.js'
import { findNvcc, output } from './tools.js'

const SOURCES = join('native', 'cuda')
/** Targets of CMake: the kernels for bfloat16 and for float16. */
const LIBRARIES = ['refit_cuda', 'refit_cuda_fp16']
/** The compute capabilities that a published build serves, and PTX of the newest for those to come. */
const RELEASE_ARCHS = ['80', '90', '100', '120']

/** Builds the CUDA libraries with the addon. A machine that cannot keeps its CPU engine, unless REFIT_CUDA=1. */
export async function buildCudaIfWanted (build) {
  const wanted = process.env.REFIT_CUDA ?? ''
  if (!existsSync(join(SOURCES, 'CMakeLists.txt'))) return
  if (wanted === '0') return build.report('no CUDA library: REFIT_CUDA=0')
  if (wanted !== '' && wanted !== '1') throw new Error(`REFIT_CUDA: expected 1 or 0, got "${wanted}"`)
  if (wanted === '1') return await buildCuda(build, { library: true })
  const missing = !['/dev/nvidiactl', '/proc/driver/nvidia'].some(path => existsSync(path))
    ? 'there is no NVIDIA GPU here'
    : findNvcc() === undefined
    ? 'there is no nvcc'
    : undefined
  if (missing !== undefined) return build.report(`no CUDA library: ${missing} (REFIT_CUDA=1 insists on building it)`)
  try {
    await buildCuda(build, { library: true })
  } catch (error) {
    console.error(`${error.message}\nrefit: the CUDA library was not built (see above); the CPU engine was`)
  }
}

/** Builds the CUDA libraries, the GPU test and bench programs, or both. */
export async function buildCuda (build, { library = false, programs = false }) {
  const nvcc = findNvcc()
  if (nvcc === undefined) {
    throw new Error(
      'the CUDA library needs nvcc: install the CUDA toolkit (12.8 or newer), or name its folder in CUDA_HOME'
    )
  }
  const archs = architectures()
  const folder = build.folder('cuda')
  await build.cmake(
    folder,
    [
      `-DCMAKE_CUDA_COMPILER=${nvcc}`,
      `-DCMAKE_CUDA_HOST_COMPILER=${build.compiler}`,
      `-DCMAKE_CUDA_ARCHITECTURES=${archs}`,
      `-DREFIT_UNOPTIMIZED=${process.env.REFIT_CUDA_UNOPTIMIZED === '1' ? 'ON' : 'OFF'}`
    ],
    [...library ? LIBRARIES : [], ...programs ? ['cuda_tests'] : []],
    SOURCES
  )
  if (programs) build.report(`${join(folder, 'programs')} built for ${archs} in ${build.seconds()} s`)
  for (const file of library ? LIBRARIES.map(name => `lib${name}.so`) : []) {
    build.publish(join(folder, file), join(PREBUILDS, file))
  }
}

/** In CMake's names: "90-real" has code for one compute capability, "120" has PTX as well. */
function architectures () {
  const wanted = process.env.REFIT_CUDA_ARCHS ?? ''
  if (wanted === 'release') {
    return [...RELEASE_ARCHS.slice(0, -1).map(arch => `${arch}-real`), RELEASE_ARCHS.at(-1)].join(';')
  }
  const archs = wanted !== '' ? wanted.split(/[;, ]+/).filter(arch => arch !== '') : ownArchitectures()
  const bad = archs.find(arch => !/^\d{2,3}$/.test(arch) || Number(arch) < 80)
  if (bad !== undefined) {
    throw new Error(
      'REFIT_CUDA_ARCHS: expected compute capabilities of 80 or more, like "90" or "80;90;100;120", or "release"; ' +
        `got "${bad}"`
    )
  }
  return [...new Set(archs.length === 0 ? ['90'] : archs)]
    .sort((a, b) => Number(a) - Number(b))
    .map(arch => `${arch}-real`)
    .join(';')
}

/** The compute capabilities of the GPUs in this machine. */
function ownArchitectures () {
  return output('nvidia-smi', ['--query-gpu=compute_cap', '--format=csv,noheader'])
    .split('\n')
    .map(line => line.trim().replace('.', ''))
    .filter(arch => /^\d+$/.test(arch))
}
