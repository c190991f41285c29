import { spawn } from 'node:child_process'
import { existsSync, readFileSync } from 'node:fs'
import { SourceMap } from 'node:module'
import { delimiter, dirname, join, relative, resolve } from 'node:path'
import { SHORT_LIVED } from './join-modules.js'

const COMPILED = join('build', 'test')
const GRACE_MS = 10_000
const WITHOUT_DOMAINS = resolve('scripts', 'without-domains.cjs')

/** Files that share a process at most: loading tap, fastify and the program takes longer than most of their tests. */
const BATCH = 16
/** A process gets at most this part of the files that are left, so the last ones end at about the same time. */
const SHARE = 1 / 9
const LEAST = 4
/** Settings of a file for all tests of its process. It shares one with files that have the same. */
const SETTINGS = /^(process\.env\.REFIT_(NATIVE|CUDA_LIBRARY) = .*|useStandIn\(\);|.*useLoop\(\);)$/gm
/** Files that set something else for all tests of their process, or change the process, have one of their own. */
const APART = new RegExp(
  String.raw`^(await )?t\.(?!(test|teardown)\b)|^\S.*(= |await )[\w.]+\(t\b|` +
    String.raw`process\.(chdir|env|exit|kill|on|once|emit|report)|proc/self|globalThis|setGlobal`,
  'm'
)
/** Each takes as long as a batch. */
const LONG = /^build\/test\/test\/conformance\//

/**
 * Runs compiled test files, `jobs` processes at a time, each as plain `node FILE` or as a batch (run-batch.js). Under
 * tap's runner every process of a test (also its workers and servers) loads hooks for TypeScript, mocks and coverage,
 * which costs more than most tests. `root`: the folder that has the programs, under the names of build/test. Calls
 * `onEnd` with the TAP of each file in the form of a runner: its name, its tests indented, and one point for the file.
 */
export async function runTests (files, { jobs, seconds, root = COMPILED, onEnd }) {
  const waiting = batches(files).values()
  let begun = 0
  let number = 0
  await Promise.all(Array.from({ length: Math.min(jobs, files.length) }, async () => {
    for (const batch of waiting) {
      for (const outcome of await runBatch(batch, seconds, root, ++begun)) onEnd(report(++number, outcome))
    }
  }))
}

/** The files as lists that have a process each. */
function batches (files) {
  const made = []
  const open = new Map()
  for (const [index, file] of files.entries()) {
    const text = readFileSync(file, 'utf8')
    const settings = text.match(SETTINGS)?.join('\n') ?? ''
    const most = Math.max(LEAST, Math.min(BATCH, SHARE * (files.length - index)))
    if (LONG.test(file) || APART.test(text.replace(SETTINGS, ''))) made.push([file])
    else if ((open.get(settings)?.length ?? BATCH) < most) open.get(settings).push(file)
    else {
      open.set(settings, [file])
      made.push(open.get(settings))
    }
  }
  return made
}

/** Runs files in one process, and returns the outcome of each: its TAP, how it ended (0 if it passed), and its time. */
async function runBatch (files, seconds, root, number) {
  const began = performance.now()
  // tap makes the names of folders from the arguments, so these are short, and differ.
  const programs = files.map(file => join(root, relative(COMPILED, file)))
  const program = files.length === 1 ? programs : [join('scripts', 'run-batch.js'), String(number)]
  const limit = seconds * files.length
  // Without --enable-source-maps, which takes as long as many tests; `toSources` maps the positions of failures.
  const child = spawn(process.execPath, ['--require', WITHOUT_DOMAINS, ...SHORT_LIVED, ...program], {
    stdio: ['ignore', 'pipe', 'inherit'],
    env: {
      ...process.env,
      // Servers of these tests end before it is of use.
      REFIT_SKIP_SERVER_WARMUP: 'true',
      TAP: '1',
      TAP_TIMEOUT: String(limit),
      REFIT_TEST_FILES: files.join(delimiter),
      REFIT_TEST_PROGRAMS: programs.join(delimiter)
    }
  })
  let said = ''
  child.stdout.setEncoding('utf8').on('data', text => {
    said += text
  })
  // tap has the same limit, and reports the test that is late.
  const late = setTimeout(() => {
    child.kill('SIGKILL')
  }, limit * 1000 + GRACE_MS)
  const { code, signal } = await new Promise((resolve, reject) => {
    child.once('error', reject)
    child.once('close', (code, signal) => {
      resolve({ code, signal })
    })
  })
  clearTimeout(late)
  const ms = (performance.now() - began) / files.length
  const end = signal ?? code
  if (files.length === 1) return [{ file: files[0], tap: said, end, ms }]
  const outcomes = files.map(file => {
    const found = said.match(endOf(file))
    const tap = found === null ? said : said.slice(0, found.index)
    said = found === null ? '' : said.slice(found.index + found[0].length)
    return { file, tap, end: found === null || /^not ok /m.test(tap) ? end : 0, ms }
  })
  // A failure that no file reports is one of what happens after the last.
  if (outcomes.every(outcome => outcome.end === 0)) outcomes.at(-1).end = end
  return outcomes
}

/** The test by which run-batch.js marks the end of a file. */
function endOf (file) {
  const name = `end of ${file.replaceAll(/[.+]/g, '\\$&')}`
  return new RegExp(`^# Subtest: ${name}\\n(?: .*\\n)*ok \\d+ - ${name}.*\\n`, 'm')
}

function report (number, { file, tap, end, ms }) {
  const lines = (end === 0 ? tap : toSources(tap)).split('\n').filter(line => !/^TAP version/.test(line))
  if (end !== 0) lines.push(`# ended with ${end}`)
  return `# Subtest: ${file}\n${lines.map(line => line === '' ? '' : `    ${line}`).join('\n').trimEnd()}\n${
    end === 0 ? 'ok' : 'not ok'
  } ${number} - ${file} # time=${ms.toFixed(3)}ms\n\n`
}

/** Replaces positions in compiled or joined files (build/test/a.js:12:3) by those in their sources (a.ts:7:5). */
function toSources (text) {
  const maps = new Map()
  return text.replace(
    /(?:file:\/\/)?([\w./-]*build\/(?:test|joined)\/[\w./-]+\.js):(\d+):(\d+)/g,
    (position, file, line, column) => {
      if (!existsSync(`${file}.map`)) return position
      const map = maps.get(file) ?? new SourceMap(JSON.parse(readFileSync(`${file}.map`, 'utf8')))
      maps.set(file, map)
      const { originalSource, originalLine, originalColumn } = map.findEntry(line - 1, column - 1)
      if (originalSource === undefined) return position
      const source = relative(process.cwd(), join(dirname(file), originalSource))
      return `${source}:${originalLine + 1}:${originalColumn + 1}`
    }
  )
}
