import type { IncomingHttpHeaders } from 'node:http'
import type { EngineRequest } from '../remote/connection.ts'
import { fanOut } from './fan-out.ts'
import type { Fleet } from './fleet.ts'
import { bodylessHeaders, readHeaders } from './headers.ts'
import type { Outcome } from './replies.ts'
import type { Worker } from './worker.ts'

const READ_MS = 5000

/** The replies of all refit engines to a GET, also of engines that get no requests now. */
export async function readRefitEngines (
  fleet: Fleet,
  path: string,
  headers: IncomingHttpHeaders
): Promise<Outcome[]> {
  return await fanOut(refitEngines(fleet), () => ({
    method: 'GET',
    path,
    headers: readHeaders(headers),
    signal: AbortSignal.timeout(READ_MS)
  }))
}

/** The same for a POST. */
export async function askRefitEngines (
  fleet: Fleet,
  path: string,
  body: unknown,
  headers: IncomingHttpHeaders
): Promise<Outcome[]> {
  const request = { ...postOf(path, body, headers), signal: AbortSignal.timeout(READ_MS) }
  return await fanOut(refitEngines(fleet), () => request)
}

/** A request that the gateway makes for a client, with that client's keys. */
export function postOf (path: string, body: unknown, headers: IncomingHttpHeaders): EngineRequest {
  return {
    method: 'POST',
    path,
    headers: { ...bodylessHeaders(headers), 'content-type': 'application/json' },
    body: JSON.stringify(body)
  }
}

function refitEngines ({ list }: Fleet): Worker[] {
  return list.filter(({ facts }) => facts?.kind === 'refit')
}
