import { spawnSync } from 'node:child_process'
import { join } from 'node:path'

const MIN_GCC = 11
const MIN_CLANG = 14
const MIN_CMAKE = [3, 18]
const INSTALL = 'on Debian or Ubuntu: apt-get install -y cmake g++'

/** The C++ compiler, its version, and the tool that CMake drives. Throws an error that says what to install. */
export function findTools () {
  const compiler = findCompiler()
  return { compiler, generator: findGenerator() }
}

/** $CXX if it is set, else the first of the usual ones that is there. */
function findCompiler () {
  const candidates = process.env.CXX ? [process.env.CXX] : ['g++', 'c++', 'clang++']
  for (const command of candidates) {
    const text = output(command, ['--version'])
    if (text === '') continue
    const clang = /clang/.test(text)
    const version = output(command, clang ? ['-dumpversion'] : ['-dumpfullversion']).trim()
    const least = clang ? MIN_CLANG : MIN_GCC
    if (Number.parseInt(version) >= least) return { command, version }
    throw new Error(
      `${command} is version ${version}, but refit needs ${clang ? 'clang++' : 'g++'} >= ${least} for C++20; ` +
        'install a newer one or name it in CXX'
    )
  }
  throw new Error(
    `no C++ compiler found (looked for ${candidates.join(', ')}): install g++ >= ${MIN_GCC} (${INSTALL})`
  )
}

function findGenerator () {
  const [major, minor] = MIN_CMAKE
  const found = /version (\d+)\.(\d+)\S*/.exec(output('cmake', ['--version']))
  if (found === null) throw new Error(`cmake was not found: install cmake >= ${major}.${minor} (${INSTALL})`)
  if (Number(found[1]) < major || (Number(found[1]) === major && Number(found[2]) < minor)) {
    throw new Error(
      `cmake is ${found[0]}, but refit needs cmake >= ${major}.${minor}: install a newer one (${INSTALL})`
    )
  }
  if (output('ninja', ['--version']) !== '') return 'Ninja'
  if (output('make', ['--version']) !== '') return 'Unix Makefiles'
  throw new Error('cmake needs make or ninja: install one (on Debian or Ubuntu: apt-get install -y make)')
}

/** The CUDA compiler: in $CUDA_HOME, on the PATH or where the toolkit is installed by default. */
export function findNvcc () {
  const candidates = [
    process.env.CUDA_HOME && join(process.env.CUDA_HOME, 'bin', 'nvcc'),
    'nvcc',
    '/usr/local/cuda/bin/nvcc'
  ]
  return candidates.find(command => command && output(command, ['--version']) !== '')
}

/** The standard output of a program, or '' if it failed or is missing. */
export function output (command, args) {
  const { status, stdout } = spawnSync(command, args, { encoding: 'utf8' })
  return status === 0 ? stdout : ''
}
