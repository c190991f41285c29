// @ts-check
// A program with the generated TypeScript client. tsc checks it, and it drives a server. Arguments: URL, a folder of
// weights and two shards.
import assert from 'node:assert/strict'
import { readFileSync } from 'node:fs'
import createClient from 'openapi-fetch'

const [url = '', folder = '', ...shards] = process.argv.slice(2)
/** @type {import('openapi-fetch').Client<import('./api.d.ts').paths>} */
const api = createClient({ baseUrl: url })

async function answer () {
  const { data, error } = await api.POST('/generate', {
    body: { text: '123+456=', sampling_params: { max_new_tokens: 8, temperature: 0 } }
  })
  assert.ok(data !== undefined && !Array.isArray(data) && typeof data !== 'string', JSON.stringify(error))
  assert.ok(['stop', 'length'].includes(data.meta_info.finish_reason?.type ?? ''))
  return data.text
}

assert.notEqual(await answer(), '579')

const disk = await api.POST('/update_weights_from_disk', {
  body: { model_path: folder, weight_version: 'typescript disk' }
})
assert.ok(disk.data !== undefined && disk.data.report.tensors > 0, JSON.stringify(disk.error))
assert.equal(await answer(), '579')

const files = shards.map(shard => new Blob([readFileSync(shard)]))
const form = await api.POST('/update_weights_from_tensor', {
  body: { weight_version: 'typescript form', file: files },
  bodySerializer: body => {
    assert.ok('file' in body && Array.isArray(body.file))
    const form = new FormData()
    form.append('weight_version', body.weight_version ?? '')
    for (const [index, file] of body.file.entries()) form.append('file', file, `${index}.safetensors`)
    return form
  }
})
assert.ok(form.data !== undefined && form.data.report.tensors > 0, JSON.stringify(form.error))

for (const [index, file] of files.entries()) {
  const sent = await api.POST('/update_weights_from_tensor', {
    // Each file has a part of the tensors.
    params: { query: { weight_version: `typescript bytes ${index}`, allow_missing: true } },
    body: file,
    bodySerializer: body => body,
    headers: { 'content-type': 'application/octet-stream' }
  })
  assert.equal(sent.response.status, 200, JSON.stringify(sent.error))
}
assert.equal((await api.GET('/weight_version')).data?.weight_version, 'typescript bytes 1')

const refused = await api.POST('/update_weights_from_disk', { body: { model_path: '/nowhere' } })
assert.equal(refused.response.status, 400)
assert.ok(refused.error !== undefined && typeof refused.error.error !== 'string')
assert.equal(refused.error.error.code, 'CHECKPOINT_PATH')

// @ts-expect-error the field is a number
const wrong = await api.POST('/generate', { body: { text: 'x', sampling_params: { max_new_tokens: 'many' } } })
assert.equal(wrong.error?.param, 'sampling_params.max_new_tokens')
// @ts-expect-error there is no such route
assert.equal((await api.GET('/no_such_route')).response.status, 404)
console.log(
  `typescript: generated, updated from disk, by a form and by bytes; refused with ${refused.error.error.code}`
)
