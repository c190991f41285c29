import type { HrTime } from '@opentelemetry/api'

/** A time of `performance.now()` as seconds and nanoseconds since the epoch. */
export function hrTime (ms: number): HrTime {
  const [whole, part] = [Math.floor(performance.timeOrigin), performance.timeOrigin % 1]
  const sum = part + ms
  const seconds = Math.floor((whole + sum) / 1000)
  // The difference stays small, so that no digit of the nanoseconds is lost.
  return [seconds, Math.round((whole - seconds * 1000 + sum) * 1e6)]
}
