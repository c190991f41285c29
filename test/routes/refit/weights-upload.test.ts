import { createConnection } from 'node:net'
import type { Socket } from 'node:net'
import multipart from '@fastify/multipart'
import Fastify from 'fastify'
import t from 'tap'
import { joinRegex } from '../../helpers/join-regex.ts'
import type { Test } from 'tap'
import refit from '../../../src/app/plugin.ts'
import { createServer } from '../../../src/app/server.ts'
import { encodeSafetensors } from '../../../src/wire/safetensors/encode.ts'
import { ByteTokenizer } from '../../helpers/byte-tokenizer.ts'
import { FakeEngine } from '../../helpers/fake-engine.ts'
import { call, routeApp, until } from '../../helpers/route-app.ts'

const PATH = '/update_weights_from_tensor'
const file = encodeSafetensors([{ name: 'b.bias', dtype: 'F32', shape: [4], data: Buffer.alloc(16, 1) }])
const BYTES = { 'content-type': 'application/octet-stream' }

function form (fields: [string, string][], files: [string, Uint8Array][] = [['model.safetensors', file]]): FormData {
  const out = new FormData()
  for (const [name, value] of fields) out.append(name, value)
  for (const [name, bytes] of files) out.append('file', new Blob([bytes as never]), name)
  return out
}

t.test('fields are in the query or in the form, as text, before or after the file', async t => {
  const { url, engine } = await routeApp(t)
  const query = '?weight_version=7&flush_cache=false&abort_all_requests=1&nobody=knows'
  const raw = await call(url + PATH + query, undefined, { method: 'POST', body: file as never, headers: BYTES })
  t.match(raw, {
    status: 200,
    json: {
      success: true,
      message: 'Success Weight version updated to 7.',
      torn_count: 0,
      report: { tensors: 1 },
      upload: { files: 1, bytes: 16, staged: 'memory' }
    }
  })
  const late = form([])
  for (const [name, value] of [['abort_all_requests', 'true'], ['weight_version', '8'], ['unknown', 'x']] as const) {
    late.append(name, value)
  }
  t.match((await call(`${url}${PATH}?flush_cache=False`, undefined, { method: 'POST', body: late })).json, {
    message: 'Success Weight version updated to 8.'
  })
  const stream = form([['mode', 'stream'], ['abort_all_requests', 'true'], ['weight_version', '9']])
  t.match((await call(url + PATH, undefined, { method: 'POST', body: stream })).json, {
    message: 'Success Weight version updated to 9.',
    upload: { staged: 'stream' }
  })
  t.same(engine.calls, [
    'update {"abortAllRequests":true,"requireAll":"alone"}',
    'abortAll',
    'commit {"version":"7","flushCache":false}',
    'update {"abortAllRequests":true,"requireAll":"alone"}',
    'abortAll',
    'commit {"version":"8","flushCache":false}',
    'update {"abortAllRequests":true,"requireAll":"alone"}',
    'abortAll',
    'commit {"version":"9","flushCache":true}'
  ])
  t.match((await call(`${url}/metrics`)).text, /^refit:weight_updates_total\{outcome="success",.*\} 3$/m)
})

t.test('errors in fields or form are named, and nothing is written', async t => {
  const { url, engine } = await routeApp(t)
  const part = (headers: string, body = 'x'): string => `--b\r\n${headers}\r\n\r\n${body}\r\n`
  const disposition = 'content-disposition: form-data; name="f"; filename="a.safetensors"'
  const multi = { 'content-type': 'multipart/form-data; boundary=b' }
  const cases: [
    body: unknown,
    headers: Record<string, string>,
    query: string,
    status: number,
    code: string,
    message: RegExp
  ][] = [
    [file, BYTES, '?mode=fast', 400, 'UNSUPPORTED', /^mode: expected "stream" or nothing, got "fast"$/],
    [file, BYTES, '?load_format=direct', 400, 'UNSUPPORTED', /^load_format: uploads are safetensors files/],
    [file, BYTES, '?flush_cache=maybe', 400, 'INVALID_REQUEST', /^flush_cache: expected true or false/],
    [file, BYTES, '?weight_version=1&weight_version=2', 400, 'INVALID_REQUEST', /^weight_version: /],
    [file, { ...BYTES, 'content-encoding': 'gzip' }, '', 400, 'UNSUPPORTED', /content-encoding "gzip"/],
    [form([['mode', 'fast']]), {}, '', 400, 'UNSUPPORTED', /^mode: /],
    [
      form([['weight_version', '1'], ['weight_version', '2']]),
      {},
      '',
      400,
      'INVALID_REQUEST',
      /"weight_version" comes twice/
    ],
    [form([['x', 'y'.repeat(70_000)]]), {}, '', 413, 'BODY_TOO_LARGE', /the field "x" is longer than 65536 bytes/],
    [form(Array.from({ length: 101 }, (_, i) => [`f${i}`, ''])), {}, '', 413, 'BODY_TOO_LARGE', /more than 100 fields/],
    [form([['nobody', '1']], []), {}, '', 400, 'BODY_BROKEN', /no file/],
    [form([['__proto__', '1']]), {}, '', 400, 'BODY_BROKEN', /prototype property is not allowed/],
    [form([['constructor', '1']]), {}, '', 400, 'BODY_BROKEN', /prototype property is not allowed/],
    ['', { 'content-type': 'multipart/form-data' }, '', 400, 'BODY_BROKEN', /no well-formed multipart.*[Bb]oundary/],
    ['no form at all', multi, '', 400, 'BODY_BROKEN', /no well-formed multipart/],
    [part(disposition), multi, '', 400, 'BODY_BROKEN', /no well-formed multipart|terminated early/],
    [part(disposition, file.toString('latin1')), multi, '', 400, 'BODY_BROKEN', /no well-formed multipart/]
  ]
  for (const [body, headers, query, status, code, message] of cases) {
    const reply = await call(url + PATH + query, undefined, { method: 'POST', body: body as never, headers })
    t.match(reply, { status, json: { success: false, error: { code, message } } }, String(message))
  }
  t.same(engine.calls, [])
  t.equal(engine.weightVersion, 'default')
})

t.test('other types are refused before they are read, and other routes accept no uploads', async t => {
  const { url } = await routeApp(t)
  for (
    const type of [
      'text/plain',
      'application/x-www-form-urlencoded',
      'multipart/mixed; boundary=b',
      'application/octet-streams'
    ]
  ) {
    t.match(await call(url + PATH, undefined, { method: 'POST', body: 'x', headers: { 'content-type': type } }), {
      status: 415,
      json: {
        error: {
          message: joinRegex(
            /send JSON with "content-type: application\/json", or files as multipart\/form-data or/,
            / application\/octet-stream$/
          )
        }
      }
    }, type)
  }
  for (const path of ['/generate', '/update_weights_from_disk']) {
    t.equal((await call(url + path, undefined, { method: 'POST', body: file as never, headers: BYTES })).status, 415)
    t.match(await call(url + path, undefined, { method: 'POST', body: form([]) }), {
      status: 415,
      json: { message: /send JSON with "content-type: application\/json"$/ }
    })
  }
  t.equal((await call(url + PATH, {})).status, 400, 'JSON is checked as before')
})

const LARGE = encodeSafetensors([{ name: 'b.bias', dtype: 'F32', shape: [500_000], data: Buffer.alloc(2_000_000, 1) }])

// The host registers @fastify/multipart before refit (which then uses the host's), after it, or not at all.
for (const when of ['before', 'after', 'never'] as const) {
  t.test(
    'a host with parsers, hooks and limits of its own keeps them, and uploads do not ' +
      `see them (its forms: ${when})`,
    async t => {
      const engine = new FakeEngine()
      const app = Fastify({ forceCloseConnections: true, bodyLimit: 10 })
      const limits = { fileSize: 4, files: 1, fields: 1, parts: 1, fieldSize: 1, headerPairs: 1 }
      const forms = async (): Promise<unknown> =>
        await app.register(multipart, {
          attachFieldsToBody: true,
          limits,
          fileHwm: 1,
          defCharset: 'latin1',
          isPartAFile: () => false
        })
      if (when === 'before') await forms()
      app.addContentTypeParser(
        'application/octet-stream',
        { parseAs: 'buffer' },
        async (_request: unknown, body: Buffer) => ({ bytes: body.length })
      )
      for (const prefix of ['/one', '/two']) {
        await app.register(refit, { engine, tokenizer: new ByteTokenizer(), prefix })
      }
      if (when === 'after') await forms()
      app.post('/bytes', async request => request.body)
      app.post('/form', async request => Object.keys(request.body as object))
      t.teardown(async () => await app.close())
      const url = await app.listen({ port: 0 })
      for (const prefix of ['/one', '/two']) {
        t.equal(
          (await call(url + prefix + PATH, undefined, { method: 'POST', body: file as never, headers: BYTES })).status,
          200
        )
        const version = `${prefix} \u00e9`
        t.match(
          (await call(url + prefix + PATH, undefined, {
            method: 'POST',
            body: form([['flush_cache', 'false'], ['weight_version', version]], [['a', file]])
          }))
            .json,
          { message: `Success Weight version updated to ${version}.` }
        )
        const second = encodeSafetensors([{ name: 'a.weight', dtype: 'F32', shape: [4], data: Buffer.alloc(16) }])
        const large = await call(url + prefix + PATH, undefined, {
          method: 'POST',
          body: form([], [['a', LARGE], ['b', second]])
        })
        t.match(large.json, { success: true, upload: { files: 2, bytes: 2_000_016 } }, JSON.stringify(large.json))
        t.equal((await call(`${url}${prefix}/generate`, undefined, { method: 'POST', body: form([]) })).status, 415)
      }
      t.same((await call(`${url}/bytes`, undefined, { method: 'POST', body: Buffer.alloc(7), headers: BYTES })).json, {
        bytes: 7
      })
      t.equal(
        (await call(`${url}/bytes`, undefined, { method: 'POST', body: Buffer.alloc(70), headers: BYTES })).status,
        413
      )
      const own = async (body: FormData): Promise<[number, unknown]> =>
        await call(`${url}/form`, undefined, { method: 'POST', body }).then(({ status, json }) => [status, json])
      if (when === 'never') t.match(await own(form([['a', '1']], [])), [415])
      else {
        t.same(await own(form([['a', '1']], [])), [200, ['a']])
        t.match(await own(form([['a', '1'], ['b', '2']], [])), [413], 'its limits count for its own')
      }
    }
  )
}

interface Talk {
  socket: Socket
  text: () => string
}

async function talk (t: Test, url: string, head: string): Promise<Talk> {
  const { port, hostname } = new URL(url)
  const socket = createConnection(Number(port), hostname)
  let text = ''
  socket
    .on('data', data => {
      text += String(data)
    })
    .on('error', () => {})
  t.teardown(() => {
    socket.destroy()
  })
  socket.write(head)
  return { socket, text: () => text }
}

t.test('a client that sends Expect gets 100 only if its key, content type and fields are valid', async t => {
  const engine = new FakeEngine()
  const app = await createServer({ engine, tokenizer: new ByteTokenizer(), adminApiKey: 'key' })
  t.teardown(async () => await app.close())
  const url = await app.listen({ port: 0, host: '127.0.0.1' })
  const head = (path: string, ...headers: string[]): string =>
    [`POST ${path} HTTP/1.1`, 'host: localhost', 'expect: 100-continue', ...headers, '', ''].join('\r\n')
  const key = 'authorization: Bearer key'
  const refused: [string, RegExp][] = [
    [head(PATH, 'content-type: application/octet-stream', 'content-length: 9999999'), /^HTTP\/1\.1 401 /],
    [head(PATH, key, 'content-type: text/plain', 'content-length: 9999999'), /^HTTP\/1\.1 415 /],
    [
      head(`${PATH}?mode=x`, key, 'content-type: application/octet-stream', 'content-length: 9999999'),
      /^HTTP\/1\.1 400 /
    ],
    [head(PATH, key, 'content-type: application/octet-stream', 'content-length: 9999999999999999'), /^HTTP\/1\.1 507 /],
    [head('/nowhere', key, 'content-length: 5'), /^HTTP\/1\.1 404 /]
  ]
  for (const [request, status] of refused) {
    const { text } = await talk(t, url, request)
    await until(() => text().includes('\r\n\r\n'))
    t.match(text(), status)
  }
  const upload = await talk(
    t,
    url,
    head(PATH, key, 'content-type: application/octet-stream', `content-length: ${file.length}`)
  )
  await until(() => upload.text() !== '')
  t.equal(upload.text(), 'HTTP/1.1 100 Continue\r\n\r\n')
  upload.socket.write(file)
  await until(() => upload.text().includes('"success":true'))
  const json = await talk(t, url, head('/generate', 'content-type: application/json', 'content-length: 53'))
  await until(() => json.text() !== '')
  t.equal(json.text(), 'HTTP/1.1 100 Continue\r\n\r\n')
  json.socket.write('{"input_ids":[5],"sampling_params":{"max_new_tokens":1}}'.slice(0, 53))
  await until(() => /HTTP\/1\.1 [24]00 [OB]/.test(json.text()))
})

t.test('without the key no byte of a body is read', async t => {
  const { url, engine } = await routeApp(t, { adminApiKey: 'key' })
  for (const authorization of ['', 'Bearer wrong']) {
    t.equal(
      (await call(url + PATH, undefined, { method: 'POST', body: file as never, headers: { ...BYTES, authorization } }))
        .status,
      401
    )
    t.equal(
      (await call(url + PATH, undefined, { method: 'POST', body: form([]), headers: { authorization } })).status,
      401
    )
  }
  t.same(engine.calls, [])
})

t.test('a refusal in the middle of a body reaches a client that reads only after it has sent everything', async t => {
  const { url } = await routeApp(t)
  const bad = Buffer.alloc(8 << 20, 1)
  const part = Buffer.from('--b\r\ncontent-disposition: form-data; name="f"; filename="f"\r\n\r\n')
  for (
    const [type, wrong] of [['application/octet-stream', bad], [
      'multipart/form-data; boundary=b',
      Buffer.concat([part, bad, Buffer.from('\r\n--b--\r\n')])
    ]] as const
  ) {
    const { socket, text } = await talk(
      t,
      url,
      `POST ${PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: ${type}\r\ncontent-length: ${wrong.length}\r\n\r\n`
    )
    socket.pause()
    await new Promise(resolve => {
      socket.write(wrong, resolve)
    })
    socket.resume()
    await until(() => text().includes('\r\n\r\n'))
    t.match(text(), /^HTTP\/1\.1 400 /)
    // The connection stays usable.
    socket.write('GET /ping HTTP/1.1\r\nhost: localhost\r\n\r\n')
    await until(() => text().split('HTTP/1.1 ').length === 3)
  }
})
