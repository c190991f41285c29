import { spawn } from 'node:child_process'
import { cpSync, mkdirSync, readFileSync, readdirSync, symlinkSync, writeFileSync } from 'node:fs'
import { dirname, join } from 'node:path'
import ts from 'typescript'

/** Longest time of one test. A mutant that makes it hang is caught. */
const TEST_SECONDS = 180
const NOT_LINKED = ['.git', '.tap', 'build']

/**
 * A copy of the compiled tests in a folder that looks like the package: the rest of it are links to the checkout. One
 * mutant at a time is planted in it.
 */
export class Workspace {
  #root
  #compilerOptions

  /** `copied`: names in the checkout that are copied instead of linked; `omitted`: names that stay out. */
  constructor (root, folder, { copied = [], omitted = [], built = ['faults', 'stand-in'] } = {}) {
    this.#root = root
    this.folder = folder
    this.kind = 'typescript'
    mkdirSync(join(folder, 'build'), { recursive: true })
    for (const name of readdirSync(root)) {
      if (NOT_LINKED.includes(name) || omitted.includes(name)) continue
      if (copied.includes(name)) cpSync(join(root, name), join(folder, name), { recursive: true })
      else symlinkSync(join(root, name), join(folder, name))
    }
    cpSync(join(root, 'build', 'test'), join(folder, 'build', 'test'), { recursive: true })
    for (const name of built) symlinkSync(join(root, 'build', name), join(folder, 'build', name))
    const config = ts.readConfigFile(join(root, 'tsconfig.test.json'), ts.sys.readFile).config
    this.#compilerOptions = ts.parseJsonConfigFileContent(config, ts.sys, root).options
  }

  /** The source with the bug in it. Throws if the table no longer fits. */
  mutated ({ file, before, after }) {
    const parts = readFileSync(join(this.#root, file), 'utf8').split(before)
    if (parts.length !== 2) throw new Error(`"before" occurs ${parts.length - 1} times in ${file}`)
    return parts.join(after)
  }

  /** Plants the mutant. Returns the function that takes it out again. */
  async plant (mutant) {
    const compiled = join(this.folder, 'build', 'test', mutant.file.replace(/\.ts$/, '.js'))
    // A file that is compiled by itself does not read package.json, which makes it an ES module.
    const module = ts.ModuleKind.ESNext
    const { outputText, diagnostics } = ts.transpileModule(this.mutated(mutant), {
      fileName: join(this.#root, mutant.file),
      reportDiagnostics: true,
      compilerOptions: { ...this.#compilerOptions, module, sourceMap: false, incremental: false }
    })
    if (diagnostics.length > 0) {
      throw new Error(`it does not compile: ${ts.flattenDiagnosticMessageText(diagnostics[0].messageText, ' ')}`)
    }
    const original = readFileSync(compiled)
    writeFileSync(compiled, outputText)
    return () => writeFileSync(compiled, original)
  }

  /** Runs one test file; null if it passed, else how it ended. */
  async run (test) {
    const file = join(this.folder, 'build', 'test', test.replace(/\.ts$/, '.js'))
    return await this.execute(process.execPath, ['--single-threaded-gc', file], TEST_SECONDS)
  }

  /** Runs a program with all of its processes in a group of their own, so that none is left; null if it succeeds. */
  async execute (command, args, seconds, { env = {}, show = false } = {}) {
    const child = spawn(command, args, {
      cwd: this.folder,
      detached: true,
      stdio: ['ignore', 'pipe', 'pipe'],
      env: { ...process.env, TAP: '1', TAP_TIMEOUT: String(seconds), ...env }
    })
    let said = ''
    for (const stream of [child.stdout, child.stderr]) {
      stream.setEncoding('utf8').on('data', text => {
        said = (said + text).slice(-10_000)
      })
    }
    let isLate = false
    const late = setTimeout(() => {
      isLate = true
      killGroup(child.pid)
    }, (seconds + 10) * 1000)
    const end = await new Promise((resolve, reject) => {
      child.once('error', reject)
      // Not "close": a process that the test has left behind may hold the pipes.
      child.once('exit', (code, signal) => {
        resolve(signal ?? code)
      })
    })
    clearTimeout(late)
    killGroup(child.pid)
    if (end === 0) return null
    const how = isLate ? `not done in ${seconds} s` : `ended with ${end}`
    return show ? `${how}:\n${said}` : how
  }

  /** A path in the workspace, whose folder exists. */
  place (file) {
    const path = join(this.folder, file)
    mkdirSync(dirname(path), { recursive: true })
    return path
  }
}

function killGroup (pid) {
  try {
    process.kill(-pid, 'SIGKILL')
  } catch {
    // None is left.
  }
}
