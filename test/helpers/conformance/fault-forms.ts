import { setTimeout as sleep } from 'node:timers/promises'
import type { Answered, Fault, Forward, Passed } from './faulty-proxy.ts'

// Forms of faults: functions that make them, and what they are made of.

export const SUCCESS: Answered = { status: 200, body: Buffer.from('{"success":true,"message":"Success"}') }
export const FAILURE: Answered = { status: 500, body: Buffer.from('{"success":false,"message":"failed"}') }
export const SILENCE_MS = 4000

export const DISK = '/update_weights_from_disk'
export const TENSOR = '/update_weights_from_tensor'
export const isUpdate = (path: string): boolean => path.startsWith('/update_weights_from_')
export const isOk = ({ status }: Answered): boolean => status < 300

export function at (path: string): (request: string) => boolean {
  return request => request.split('?', 1)[0] === path
}

export function json (body: Buffer): any {
  return JSON.parse(body.toString())
}

/** A fault that passes a changed request on. */
export function changed (takes: Fault['takes'], change: (passed: Passed) => Partial<Passed>): Fault {
  return { takes, handle: async (passed, forward) => await forward({ ...passed, ...change(passed) }) }
}

/** A fault that changes the JSON of answers. */
export function answering (takes: Fault['takes'], change: (body: any) => any): Fault {
  return { takes, change }
}

/** Answers 200 and does nothing. */
export function swallow (takes: Fault['takes']): Fault {
  return { takes, handle: async () => SUCCESS }
}

export function silent (takes: Fault['takes']): Fault {
  return { takes, handle: async () => null }
}

/** The label of an update; null if it has none. */
export function labelOf ({ path, body }: Passed): string | null {
  const query = new URL(path, 'http://x').searchParams.get('weight_version')
  return query ?? (body[0] === 0x7b ? json(body).weight_version ?? null : null)
}

export function withoutLabel ({ path, body }: Passed): Partial<Passed> {
  return body[0] === 0x7b
    ? { body: Buffer.from(JSON.stringify({ ...json(body), weight_version: undefined })) }
    : { path: path.split('?', 1)[0]! }
}

export async function setLabel (forward: Forward, label: string): Promise<void> {
  await forward({ path: '/update_weight_version', body: { new_version: label, abort_all_requests: false } })
}

/** A fault of what comes while an update is under way, which it slows down. */
export function whileUpdating (
  takes: Fault['takes'],
  second: (passed: Passed, forward: Forward) => Promise<Answered>
): Fault {
  let running = 0
  return {
    takes,
    handle: async (passed, forward) => {
      if (running > 0) return await second(passed, forward)
      if (!isUpdate(passed.path)) return await forward(passed)
      running++
      try {
        await sleep(300)
        return await forward(passed)
      } finally {
        running--
      }
    }
  }
}
