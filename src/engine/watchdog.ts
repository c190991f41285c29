import type { Heartbeat } from './heartbeat.ts'

const LONGEST_INTERVAL_MS = 1000

/**
 * Calls `stuck` once if one step takes longer than `timeoutMs`. Counts only time in which this thread's timers ran: a
 * process that was stopped, or a busy event loop, does not mean a stuck device. Returns the function that ends it.
 */
export function startWatchdog (heartbeat: Heartbeat, timeoutMs: number, stuck: () => void): () => void {
  const intervalMs = Math.min(timeoutMs / 4, LONGEST_INTERVAL_MS)
  let step: number | null = null
  let waitedMs = 0
  let last = performance.now()
  const timer = setInterval(() => {
    const now = performance.now()
    const passedMs = Math.min(now - last, 2 * intervalMs)
    last = now
    const current = heartbeat.step
    waitedMs = current === null || current !== step ? 0 : waitedMs + passedMs
    step = current
    if (waitedMs < timeoutMs) return
    clearInterval(timer)
    stuck()
  }, intervalMs)
  timer.unref()
  return () => {
    clearInterval(timer)
  }
}
