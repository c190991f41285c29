import { build } from 'esbuild'
import { readFileSync, rmSync } from 'node:fs'
import { dirname, join, relative, resolve } from 'node:path'
import { pathToFileURL } from 'node:url'
import { cacheProgram } from './code-cache.js'

/** Programs that processes are started with, by their paths. */
const STARTED = ['src/main.js', 'src/cli/replica.js', 'src/engine/memory/probe-child.js']
/** Programs of workers. They share no modules with others, so each is one file. */
const WORKERS = [
  'src/deltas/pull-worker.js',
  'src/engine/worker.js',
  'src/sources/tensor/handle-worker.js',
  'src/text/text-worker.js'
]

/**
 * Options of Node.js for tests and their servers, which end after seconds: threads that collect garbage beside the
 * program cost more than they save while all cores have work, code has to run nine times as long as usual before it is
 * optimized, which takes a tenth of all CPU time, and a heap that begins with 256 MiB is not collected while it grows
 * there.
 */
export const SHORT_LIVED = ['--single-threaded-gc', '--interrupt-budget=600000', '--initial-heap-size=256']

/**
 * Writes the compiled programs in `from` (and those of `entries`, which are paths in it) with the packages that they
 * import to `to`, as few files under the same names. A program then starts in half of the CPU time, because Node.js
 * resolves, reads and compiles a hundred files and not a thousand. The code is the same, and modules that programs of
 * one process share are loaded once. `isDense`: without white space, which Node.js takes 30 ms to skip; a failure then
 * shows no line of its source.
 */
export async function joinModules (from, to, { entries = [], external = [], isDense = false } = {}) {
  const options = {
    ...common(from, to, isDense, external),
    chunkNames: 'chunks/[hash]',
    format: 'esm',
    // Packages of CommonJS call `require`, which ES modules do not have.
    banner: {
      js: "import { createRequire as requireOf } from 'node:module'; const require = requireOf(import.meta.url);"
    }
  }
  await build({ ...options, entryPoints: [...STARTED, ...entries].map(path => join(from, path)), splitting: true })
  await build({ ...options, entryPoints: WORKERS.map(path => join(from, path)) })
}

/** Joins the built program for tests that start many servers. Returns the path of its command line. */
export async function joinProgram () {
  const from = 'dist'
  const served = join('build', 'served')
  const [main] = STARTED
  // V8 recognizes the source of a cache by its length alone, so no cache may remain.
  rmSync(served, { recursive: true, force: true })
  await joinModules(from, served, { isDense: true })
  const program = join(served, main)
  await cacheProgram(program, { ...common(from, served, true), entryPoints: [join(from, main)] }, SHORT_LIVED)
  return program
}

/** Options of esbuild for all formats. */
function common (from, to, isDense, external = []) {
  return {
    outdir: to,
    outbase: from,
    bundle: true,
    platform: 'node',
    target: 'node20.19',
    sourcemap: true,
    // A stack has the positions; the sources are in the checkout.
    sourcesContent: false,
    minifyWhitespace: isDense,
    // Loaded on demand, by few. Joined, names of CommonJS packages are missing from a dynamic import.
    external: ['@opentelemetry/*', ...external],
    plugins: [ownPaths(from, to)],
    logLevel: 'warning'
  }
}

/** Modules that ask for their own path get it: the files that they start or read by it stay where they are. */
function ownPaths (from, to) {
  return {
    name: 'own-paths',
    setup (builder) {
      builder.onLoad({ filter: /\.js$/ }, ({ path }) => {
        const source = readFileSync(path, 'utf8')
        if (!/import\.meta\.url|__dirname|__filename/.test(source)) return undefined
        const inside = relative(resolve(from), path)
        const place = inside.startsWith('..') ? path : resolve(to, inside)
        const contents = source
          .replaceAll('import.meta.url', JSON.stringify(pathToFileURL(place).href))
          .replaceAll(/\b__dirname\b/g, JSON.stringify(dirname(place)))
          .replaceAll(/\b__filename\b/g, JSON.stringify(place))
        return { contents, loader: 'js' }
      })
    }
  }
}
