import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import t from 'tap'
import { packageRoot } from '../../src/root.ts'
import { answers, modelFolder, serve } from '../helpers/load-from.ts'

interface Entry {
  dtype: string
  shape: number[]
  data_offsets: [number, number]
}

/** Two files, each with half of a checkpoint's tensors. */
function halves (file: string, folder: string): string[] {
  const all = readFileSync(file)
  const begin = 8 + Number(all.readBigUInt64LE(0))
  const entries = Object.entries(JSON.parse(all.toString('utf8', 8, begin)) as Record<string, Entry>).filter(([name]) =>
    name !== '__metadata__'
  )
  return [0, 1].map(half => {
    const header: Record<string, Entry> = {}
    const data: Buffer[] = []
    let at = 0
    for (const [name, { data_offsets: [from, to], ...entry }] of entries.filter((_, index) => index % 2 === half)) {
      header[name] = { ...entry, data_offsets: [at, at += to - from] }
      data.push(all.subarray(begin + from, begin + to))
    }
    const text = Buffer.from(JSON.stringify(header))
    const length = Buffer.alloc(8)
    length.writeBigUInt64LE(BigInt(text.length))
    const path = join(folder, `${half}.safetensors`)
    writeFileSync(path, Buffer.concat([length, text, ...data]))
    return path
  })
}

t.test('torn weights are healed from disk in parts, and each reply counts the tensors still torn', async t => {
  const folder = mkdtempSync(join(tmpdir(), 'refit-parts-'))
  t.teardown(() => {
    rmSync(folder, { recursive: true })
  })
  const [first, second] = halves(join(modelFolder('adder'), 'model.safetensors'), folder)
  const one = await serve(t, 'adder-base', { weightVersion: 'step-1' }, {
    modelRoots: [folder, join(packageRoot, 'models')]
  })
  const all = Object.keys(await one.sums() as object).length
  t.match(await one.post('/weights_checker', { action: 'reset_tensors' }), { status: 200 })
  const part = await one.post('/update_weights_from_disk', { model_path: first, allow_missing: true })
  t.match(part, { status: 200, body: { success: true, torn_count: Math.floor(all / 2) } })
  t.match(await one.post('/generate', { text: '1+1=' }), { status: 503 })
  t.match(
    await one.post('/update_weights_from_disk', { model_path: second, allow_missing: true, weight_version: 'step-2' }),
    {
      status: 200,
      body: { torn_count: 0 }
    }
  )
  t.equal(one.engine.weightVersion, 'step-2')
  t.same(await answers(one), await answers(await serve(t, 'adder')))
})
