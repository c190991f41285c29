import type { Test } from 'tap'
import { checkServer } from '../../../src/conformance/check-server.ts'
import { PROMISES } from '../../../src/conformance/promises/index.ts'
import type { Row } from '../../../src/conformance/promise.ts'
import { nameRow } from '../../../src/conformance/run-promises.ts'
import type { ServerKind } from '../../../src/conformance/servers/detect.ts'
import { serveModel } from './served-model.ts'

interface KeptOptions {
  dialect: ServerKind
  tp?: number
  bucketBytes?: number
  /** Names of rows that the dialect does not offer. */
  notOffered?: RegExp
}

/** Checks that refit keeps every promise, and has its weights and label back. Returns the rows. */
export async function keepsAll (
  t: Test,
  { dialect, tp = 1, bucketBytes = 1 << 20, notOffered = /^$/ }: KeptOptions
): Promise<Row[]> {
  const { url, options } = await serveModel(t, { isSmall: true, tp, bucketBytes, groupTimeoutMs: 60_000 })
  const before = await (await fetch(`${url}/weights_checker`)).json()
  const rows = await checkServer(url, { ...options, dialect })
  t.same(named(rows, 'broken'), [])
  t.same(named(rows, 'not run'), [])
  t.same(named(rows, 'not offered').filter(name => !notOffered.test(name)), [])
  const ids = new Set(rows.map(row => nameRow(row, '')))
  t.same(PROMISES.map(promise => nameRow(promise, '')).filter(name => !ids.has(name)), [], 'every promise has a row')
  t.same(await (await fetch(`${url}/weights_checker`)).json(), before, 'the weights are those of the start')
  t.match(await (await fetch(`${url}/model_info`)).json(), { weight_version: 'default' })
  return rows
}

function named (rows: readonly Row[], verdict: Row['verdict']): string[] {
  return rows.filter(row => row.verdict === verdict).map(row => `${nameRow(row, row.way)}: ${row.detail}`)
}
