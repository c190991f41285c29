import { spawn } from 'node:child_process'
import { existsSync, readdirSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'

// Programs that may hang, on a machine that others wait for: each in a process group of its own, with a limit, and nothing left behind.

/** After its limit a program is asked to end, and so long later made to. */
const GRACE_MS = 15_000
const groups = new Set()

/**
 * Runs a program; resolves to { code (exit status, name of a signal or what kept it from starting), text, out, seconds, late }. `show`:
 * what it says is shown as it comes, else it is in `text`, and of that the standard output in `out`.
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
    // What it started must not outlive it, nor keep its output open.
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

/** When this program is told to end, so are those that it runs; `tell` may say first what there is so far. */
export function endTogether (tell) {
  for (const signal of ['SIGINT', 'SIGTERM', 'SIGHUP']) {
    process.once(signal, () => {
      for (const pid of groups) endGroup(pid)
      tell(signal)
      process.exit(1)
    })
  }
}

/** Removes the checkpoints of programs that were killed; returns what was removed. Call the result of `watchLeftovers` at the end. */
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
      // The process that made it is in its name.
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
