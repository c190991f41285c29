import { mkdirSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import type { Test } from 'tap'
import { encodeSafetensors } from '../../src/wire/safetensors/encode.ts'
import { layout, uploadServer } from '../helpers/uploads.ts'
import type { Reply, UploadServer } from '../helpers/uploads.ts'

// The adder's 46 tensors; its head is tied, so no checkpoint of it has a tensor for that.

const DISK = '/update_weights_from_disk'
const REFUSED = {
  status: 400,
  body: {
    success: false,
    message: /45 of the 46 tensors of the model are missing: .*Nothing has changed.*"allow_missing": true/,
    error: { code: 'WEIGHTS_INCOMPLETE' }
  }
}

interface Parts extends UploadServer {
  root: string
  json: (path: string, body: object) => Promise<Reply>
  /** A safetensors file with these tensors of the adder. */
  part: (from: number, to: number) => Buffer
}

async function server (t: Test): Promise<Parts> {
  const root = t.testdir({})
  const made = await uploadServer(t, { modelRoots: [root] })
  const file = made.file('adder')
  const { tensors } = layout(file)
  return {
    ...made,
    root,
    json: async (path, body) => {
      const reply = await fetch(made.url + path, {
        method: 'POST',
        headers: { 'content-type': 'application/json' },
        body: JSON.stringify(body)
      })
      return { status: reply.status, body: await reply.json() }
    },
    part: (from, to) =>
      encodeSafetensors(
        tensors.slice(from, to).map(({ name, dtype, shape, begin, end }) => ({
          name,
          dtype,
          shape,
          data: file.subarray(begin, end)
        }))
      )
  }
}

t.test('a folder or file that lacks tensors is refused unchanged, unless allow_missing is set', async t => {
  const one = await server(t)
  const before = await one.checksums()
  const folder = join(one.root, 'part')
  mkdirSync(folder)
  const file = join(folder, 'model.safetensors')
  writeFileSync(file, one.part(0, 1))
  for (const path of [folder, file]) {
    t.match(await one.json(DISK, { model_path: path, weight_version: 'bad' }), REFUSED, path)
    t.match(await one.json(DISK, { model_path: path, allow_missing: false }), REFUSED)
  }
  t.equal(one.engine.weightVersion, 'default')
  t.same(await one.checksums(), before)
  t.match(await one.json(DISK, { model_path: folder, weight_version: 'part', allow_missing: true }), {
    status: 200,
    body: { report: { tensors: 1, missing_count: 45 } }
  })
  t.equal(one.engine.weightVersion, 'part')
  t.notSame(await one.checksums(), before)
  writeFileSync(file, one.part(0, 46))
  t.match(await one.json(DISK, { model_path: folder, weight_version: 'whole' }), {
    status: 200,
    body: { report: { missing_count: 0 } }
  })
})

t.test('an upload that lacks tensors is refused unchanged in all its forms, unless allow_missing is set', async t => {
  const one = await server(t)
  const before = await one.checksums()
  t.match(await one.send(one.part(0, 1), '?weight_version=bad'), REFUSED)
  t.match(await one.send(one.part(0, 1), '?weight_version=bad&mode=stream'), REFUSED)
  t.match(await one.form([['weight_version', 'bad'], ['f', one.part(0, 1), 'a']]), REFUSED)
  t.equal(one.engine.weightVersion, 'default')
  t.same(await one.checksums(), before)
  t.match(await one.send(one.part(0, 1), '?mode=stream&allow_missing=true'), { status: 200 })
  t.match(await one.form([['f', one.part(0, 1), 'a'], ['allow_missing', 'true']]), { status: 200 })
  t.match(await one.form([['f', one.part(0, 20), 'a'], ['g', one.part(20, 46), 'b']]), {
    status: 200,
    body: { report: { missing_count: 0 } }
  })
})

t.test('an upload of nothing but a tied head is refused, and does not move the label', async t => {
  const one = await server(t)
  const { tensors } = layout(one.file('adder'))
  const { dtype, shape } = tensors.find(({ name }) => name === 'model.embed_tokens.weight')!
  const head = encodeSafetensors([{
    name: 'lm_head.weight',
    dtype,
    shape,
    data: Buffer.alloc(shape.reduce((product, size) => product * size, dtype === 'F32' ? 4 : 2))
  }])
  t.match(await one.send(head, '?weight_version=bad&allow_missing=true'), {
    status: 400,
    body: { message: /contains no weight of this model/, error: { code: 'WEIGHTS_INCOMPLETE' } }
  })
  t.equal(one.engine.weightVersion, 'default')
})

t.test('parts of one transaction are accepted, unless they are to be whole', async t => {
  const one = await server(t)
  const { body: { id } } = await one.json('/weight_transactions', { owner: 'test', expected: 'all' })
  t.match(await one.send(one.part(0, 20), `?transaction=${id}`), { status: 200 })
  t.match(await one.send(one.part(0, 20), `?transaction=${id}&allow_missing=false`), {
    status: 400,
    body: { error: { code: 'WEIGHTS_INCOMPLETE' } }
  })
  const folder = join(one.root, 'rest')
  mkdirSync(folder)
  writeFileSync(join(folder, 'model.safetensors'), one.part(0, 46))
  t.match(await one.json(DISK, { model_path: folder, transaction: id, allow_missing: false }), { status: 200 })
  t.match(await one.json(`/weight_transactions/${id}/commit`, { weight_version: 'all' }), { status: 200 })
  t.equal(one.engine.weightVersion, 'all')
})
