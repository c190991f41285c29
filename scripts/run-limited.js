import { spawn } from 'node:child_process'
import { existsSync, readdirSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'

// Runs programs that may hang: each in its own process group and with a time limit, so that nothing is left behind.

/** At its limit a program gets SIGTERM, and after this time SIGKILL. */
const GRACE_MS = 15_000
const groups = new Set()

/**
 * Runs a program. Resolves to { code (exit status, name of a signal or the error at its start), text, out, seconds,
 * late }. With `show` its output is shown as it comes; else it is in `text`, and its standard output also in `out`.
 */
export async function runLimited ([command, ...args], { seconds, show = false, env = process.env }) {
  const began = Date.now()
  const child = spawn(command, args, {
    stdio: ['ignore', show ? 'inherit' : 'pipe', show ? 'inherit' : 'pipe'],
    detached: true,
    env
  })
  const said = []
  const out = []
  let late = false
  const timers = []
  if (child.pid !== undefined) groups.add(child.pid)
  for (const stream of [child.stdout, child.stderr]) stream?.on('data', chunk => said.push(chunk))
  child.stdout?.on('data', chunk => out.push(chunk))
  timers.push(setTimeout(() => {
    late = true
    child.kill('SIGTERM')
    timers.push(setTimeout(() => {
      endGroup(child.pid)
    }, GRACE_MS))
  }, 1000 * seconds))
  const code = await new Promise(resolve => {
    child.on('error', error => {
      resolve(error.message)
    })
    // Its own children must not outlive it, and must not keep its output open.
    child.on('exit', () => {
      endGroup(child.pid)
    })
    child.on('close', (code, signal) => {
      resolve(code ?? signal)
    })
  })
  for (const timer of timers) clearTimeout(timer)
  groups.delete(child.pid)
  const [text, outText] = [said, out].map(chunks => Buffer.concat(chunks).toString().trimEnd())
  return { code, text, out: outText, seconds: (Date.now() - began) / 1000, late }
}

/** A signal that ends this program ends the programs that it runs, too. `report` is called before. */
export function endTogether (report) {
  for (const signal of ['SIGINT', 'SIGTERM', 'SIGHUP']) {
    process.once(signal, () => {
      for (const pid of groups) endGroup(pid)
      report(signal)
      process.exit(1)
    })
  }
}

/** Call the result at the end: it removes the checkpoints that killed programs left, and returns their paths. */
export function watchLeftovers () {
  const before = new Set(leftovers())
  return () => {
    const left = leftovers().filter(path => !before.has(path))
    for (const path of left) rmSync(path, { recursive: true, force: true })
    return left
  }
}

function leftovers () {
  return ['/dev/shm', tmpdir()].flatMap(folder => {
    try {
      // The name has the id of the process that made it.
      return readdirSync(folder)
        .filter(name => /^refit-gpu-\d+-/.test(name) && !existsSync(`/proc/${name.split('-')[2]}`))
        .map(name => join(folder, name))
    } catch {
      return []
    }
  })
}

function endGroup (pid) {
  try {
    process.kill(-pid, 'SIGKILL')
  } catch {}
}
