import { spawn } from 'node:child_process'

const GRACE_MS = 10_000

/**
 * Runs compiled test files, `jobs` at a time, each as plain `node FILE`. Under tap's runner every process of a test
 * (also its workers and servers) loads hooks for TypeScript, mocks and coverage, which costs more than most tests.
 * Calls `onEnd` with the TAP of each file in the form of a runner: its name, its tests indented, and one point for the
 * file.
 */
export async function runTests (files, { jobs, seconds, onEnd }) {
  const waiting = files.entries()
  await Promise.all(Array.from({ length: Math.min(jobs, files.length) }, async () => {
    for (const [index, file] of waiting) onEnd(await runTest(file, index + 1, seconds))
  }))
}

async function runTest (file, number, seconds) {
  const began = performance.now()
  const child = spawn(process.execPath, ['--enable-source-maps', file], {
    stdio: ['ignore', 'pipe', 'inherit'],
    env: { ...process.env, TAP: '1', TAP_TIMEOUT: String(seconds) }
  })
  let said = ''
  child.stdout.setEncoding('utf8').on('data', text => {
    said += text
  })
  // tap has the same limit, and reports the test that is late.
  const late = setTimeout(() => {
    child.kill('SIGKILL')
  }, seconds * 1000 + GRACE_MS)
  const { code, signal } = await new Promise((resolve, reject) => {
    child.once('error', reject)
    child.once('close', (code, signal) => {
      resolve({ code, signal })
    })
  })
  clearTimeout(late)
  const lines = said.split('\n').filter(line => !/^TAP version/.test(line))
  if (code !== 0) lines.push(`# ended with ${signal ?? code}`)
  const ms = (performance.now() - began).toFixed(3)
  return `# Subtest: ${file}\n${lines.map(line => line === '' ? '' : `    ${line}`).join('\n').trimEnd()}\n${
    code === 0 ? 'ok' : 'not ok'
  } ${number} - ${file} # time=${ms}ms\n\n`
}
