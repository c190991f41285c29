import { spawn, spawnSync } from 'node:child_process'
import { copyFileSync, existsSync, mkdirSync, readFileSync, renameSync, rmSync, statSync, writeFileSync } from 'node:fs'
import { availableParallelism } from 'node:os'
import { dirname, join, resolve } from 'node:path'

export const PREBUILDS = join('prebuilds', `${process.platform}-${process.arch}`)
/** At most so many compilers: one can take 2 GB. */
const PARALLEL = Math.max(2, Math.min(availableParallelism(), 8))

/** One run of the build script: configures and builds with CMake, and publishes the binaries. */
export class Build {
  #tools
  #verbose
  #started = Date.now()

  constructor (tools, verbose) {
    this.#tools = tools
    this.#verbose = verbose
  }

  get compiler () {
    return this.#tools.compiler.command
  }

  /** Seconds since the build began. */
  seconds () {
    return ((Date.now() - this.#started) / 1000).toFixed(1)
  }

  report (message) {
    console.log(`refit: ${message}`)
  }

  /** build/<name>, emptied if another compiler or generator made it, or if it was made in another place. */
  folder (name) {
    const folder = join('build', name)
    const made = JSON.stringify([process.cwd(), this.#tools])
    const mark = join(folder, 'made-by.json')
    if (existsSync(folder) && (!existsSync(mark) || readFileSync(mark, 'utf8') !== made)) {
      rmSync(folder, { recursive: true })
    }
    mkdirSync(folder, { recursive: true })
    writeFileSync(mark, made)
    return folder
  }

  /** Builds `targets` of the project in `from`; without targets all that it builds by default. */
  async cmake (folder, flags, targets, from = 'native') {
    const configure = [
      '-S',
      from,
      '-B',
      folder,
      '-G',
      this.#tools.generator,
      `-DCMAKE_CXX_COMPILER=${this.compiler}`,
      ...flags
    ]
    // Configuring takes seconds, so it runs only for other settings. The build itself runs it again if CMake files
    // change.
    const settings = join(folder, 'configured.json')
    const same = existsSync(join(folder, 'CMakeCache.txt')) && existsSync(settings) &&
      readFileSync(settings, 'utf8') === JSON.stringify(configure)
    if (!same) {
      await this.#tool('cmake', configure)
      writeFileSync(settings, JSON.stringify(configure))
    }
    await this.#tool('cmake', [
      '--build',
      folder,
      '--parallel',
      String(PARALLEL),
      ...targets.flatMap(target => ['--target', target])
    ])
  }

  /** Runs the test programs of a build folder. */
  ctest (folder) {
    const { status } = spawnSync('ctest', ['--output-on-failure', '--parallel', '2'], { cwd: folder, stdio: 'inherit' })
    if (status !== 0) {
      throw new Error(`native tests failed (see above; the log is ${folder}/Testing/Temporary/LastTest.log)`)
    }
  }

  /**
   * Tries the binary in a process of its own, then renames it into place, so a running process keeps the file that it
   * has loaded.
   */
  publish (from, to) {
    if (existsSync(to) && statSync(to).mtimeMs >= statSync(from).mtimeMs) return this.report(`${to} is up to date`)
    const tried = tryToLoad(resolve(from))
    if (tried.status !== 0) throw new Error(`${from} was built but does not load:\n${tried.stderr}`)
    mkdirSync(dirname(to), { recursive: true })
    const temporary = `${to}.${process.pid}`
    copyFileSync(from, temporary)
    renameSync(temporary, to)
    this.report(`${to} built in ${this.seconds()} s`)
  }

  /** Runs a tool. Its output is shown if it fails. */
  async #tool (command, args) {
    if (this.#verbose) console.log([command, ...args].join(' '))
    const child = spawn(command, args, { stdio: ['ignore', 'pipe', 'pipe'] })
    const chunks = []
    for (const stream of [child.stdout, child.stderr]) {
      stream.on('data', chunk => this.#verbose ? process.stderr.write(chunk) : chunks.push(chunk))
    }
    const code = await new Promise((resolve, reject) => child.on('error', reject).on('close', resolve))
    if (code !== 0) throw new Error(`${Buffer.concat(chunks).toString()}${command} failed (exit ${code})`)
  }
}

/** The addon must have a kernel for this machine. A CUDA library must open without a driver, too. */
function tryToLoad (file) {
  if (file.endsWith('.node')) {
    return node(`if (require(${JSON.stringify(file)}).isas().length === 0) process.exit(1)`, { LD_BIND_NOW: '1' })
  }
  const addon = resolve(PREBUILDS, 'refit.node')
  if (!/refit[^/]*$/.test(file) || !existsSync(addon)) return { status: 0 }
  return node(
    `const { runtimeCuda, error } = require(${JSON.stringify(addon)}).cudaGpus()
     if (runtimeCuda === '') { console.error(error); process.exit(1) }`,
    { REFIT_CUDA_LIBRARY: file }
  )
}

function node (script, env) {
  return spawnSync(process.execPath, ['-e', script], { encoding: 'utf8', env: { ...process.env, ...env } })
}
