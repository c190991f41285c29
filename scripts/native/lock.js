import { mkdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs'
import { dirname } from 'node:path'

/** Waits until no other build holds the lock file, then takes it. Returns the function that releases it. */
export function lock (file) {
  mkdirSync(dirname(file), { recursive: true })
  for (let waited = 0;; waited++) {
    try {
      writeFileSync(file, String(process.pid), { flag: 'wx' })
      process.once('exit', () => rmSync(file, { force: true }))
      return () => rmSync(file, { force: true })
    } catch (error) {
      if (error.code !== 'EEXIST') throw error
    }
    // A process that was killed leaves its lock behind.
    if (!isAlive(file)) rmSync(file, { force: true })
    else if (waited === 0) console.log('refit: another build is running, waiting for it')
    else if (waited > 6000) {
      console.error(`refit: ${file} has been held for ten minutes: end that build, or remove the file`)
      process.exit(1)
    }
    Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 100)
  }
}

function isAlive (file) {
  try {
    process.kill(Number(readFileSync(file, 'utf8')), 0)
    return true
  } catch (error) {
    return error.code === 'EPERM'
  }
}
