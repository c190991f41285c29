import { existsSync, readFileSync, writeFileSync } from 'node:fs'
import { basename, join } from 'node:path'
import { Workspace } from './workspace.js'

const BUILD_SECONDS = 1800
const CPP_SECONDS = 300
/** Each source is compiled by itself, so a mutant costs one. */
const BUILD = { REFIT_UNITY: '0', REFIT_CUDA: '0' }
const GPU_TESTS = 'native/test/gpu/'

/**
 * A copy of native/ with build folders and an addon of its own. Its tests are test files of npm test, which load that
 * addon, C++ tests under the address sanitizer, and C++ tests that need a GPU.
 */
export class NativeWorkspace extends Workspace {
  constructor (root, folder) {
    super(root, folder, { copied: ['native', 'scripts'], omitted: ['prebuilds'], built: [] })
    this.kind = 'native'
  }

  /** Why a test cannot run here; null if it can. */
  static lacks (test) {
    if (!test.startsWith(GPU_TESTS) || existsSync('/dev/nvidiactl')) return null
    return 'it needs a GPU'
  }

  async plant (mutant) {
    const path = join(this.folder, mutant.file)
    const original = readFileSync(path)
    writeFileSync(path, this.mutated(mutant))
    return () => writeFileSync(path, original)
  }

  async run (test) {
    if (test.startsWith(GPU_TESTS)) {
      await this.#build('--cuda-tests')
      return await this.execute(join('build', 'cuda', 'programs', nameOf(test)), [], CPP_SECONDS)
    }
    if (test.endsWith('.cc')) {
      await this.#build(`--program=${nameOf(test)}`)
      return await this.execute(join('build', 'native-tests', nameOf(test)), [], CPP_SECONDS)
    }
    await this.#build('--faults')
    return await super.run(test)
  }

  async #build (...args) {
    const failure = await this.execute(
      process.execPath,
      [join('scripts', 'build-native.js'), ...args],
      BUILD_SECONDS,
      { env: BUILD, show: true }
    )
    if (failure !== null) throw new Error(`it does not build: ${failure}`)
  }
}

function nameOf (test) {
  return basename(test).replace(/\.(cc|cu)$/, '')
}
