// Measures the adder behind a running server: node dist/examples/adder/measure.js [--url http://127.0.0.1:30000]
// [--prompts FILE] [--batch 50]

import { readFile } from 'node:fs/promises'
import { join } from 'node:path'
import { parseArgs } from 'node:util'
import { ClientError, RefitClient } from 'refit'
import type { GenerateOutput } from 'refit'
import { packageRoot } from '../../src/root.ts'

const { values } = parseArgs({
  options: {
    url: { type: 'string', default: 'http://127.0.0.1:30000' },
    prompts: { type: 'string', default: join(packageRoot, 'examples/adder/prompts.txt') },
    batch: { type: 'string', default: '50' }
  }
})

const batch = Number(values.batch)
if (!Number.isInteger(batch) || batch < 1) throw new Error(`--batch must be a whole number from 1, got ${values.batch}`)
const prompts = (await readFile(values.prompts, 'utf8')).split('\n').filter(line => line !== '')
const client = new RefitClient(values.url)
const versions = new Set<string>()
let right = 0
for (let at = 0; at < prompts.length; at += batch) {
  const asked = prompts.slice(at, at + batch)
  const replies = await generate(asked)
  for (const [index, reply] of replies.entries()) {
    versions.add(reply.meta_info.weight_version)
    if (reply.meta_info.finish_reason?.type === 'stop' && reply.text === sum(asked[index]!)) right++
  }
}
await client.close()
console.log(
  `${right} of ${prompts.length} sums right (${(100 * right / prompts.length).toFixed(1)} %), weight version ${
    [...versions].join(', ')
  }`
)

async function generate (text: string[]): Promise<GenerateOutput[]> {
  const replies = await client.generate({ text, sampling_params: { temperature: 0, max_new_tokens: 8 } }).catch(
    cause => {
      if (!(cause instanceof ClientError) || cause.status !== 0) throw cause
      throw new Error(`no server answers at ${values.url} (start one with: npm start)`, { cause })
    }
  )
  if (!Array.isArray(replies) || replies.length !== text.length) {
    throw new Error(`${text.length} prompts sent, got ${JSON.stringify(replies).slice(0, 200)}`)
  }
  return replies
}

/** "12+345=" -> "357" */
function sum (prompt: string): string {
  const match = /^(\d+)\+(\d+)=$/.exec(prompt)
  if (match === null) throw new Error(`not a sum: ${JSON.stringify(prompt)}`)
  return String(Number(match[1]) + Number(match[2]))
}
