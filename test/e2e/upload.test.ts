import t from 'tap'
import { once } from 'node:events'
import type { IncomingMessage } from 'node:http'
import { setImmediate, setTimeout as sleep } from 'node:timers/promises'
import { encodeHeader, encodeSafetensors } from '../../src/wire/safetensors/encode.ts'
import { eventually } from '../helpers/eventually.ts'
import { layout, PATH, post, uploadServer } from '../helpers/uploads.ts'
import type { FormParts, Reply } from '../helpers/uploads.ts'

// Uploads into the bundled model, over real sockets. The model has 937 KB, so with 512 KB of memory it is spooled.

const SMALL = 512 << 10
const WAYS = [
  { way: 'memory', memory: undefined, query: '' },
  { way: 'disk', memory: SMALL, query: '' },
  { way: 'stream', memory: SMALL, query: '&mode=stream' }
] as const

for (const { way, memory, query } of WAYS) {
  for (const tp of [1, 2]) {
    t.test(`uploads of A, B, A by ${way} on ${tp} ranks, raw and as a form, leave A, B, A`, async t => {
      const server = await uploadServer(t, { uploadMemoryBytes: memory, tp })
      const a = await server.checksums()
      const raw = await server.send(server.file('adder'), `?weight_version=b${query}`)
      t.match(raw, {
        status: 200,
        body: {
          success: true,
          message: 'Success Weight version updated to b.',
          torn_count: 0,
          report: { source: 'upload', tensors: 46, bytes: 936896, missing_count: 0 },
          upload: { files: 1, bytes: 936896, staged: way }
        }
      })
      const b = await server.checksums()
      t.notSame(b, a)
      t.match((await server.generate()).body, { text: '46' }, 'it adds')
      const fields: FormParts = [['weight_version', 'a'], ['flush_cache', 'false']]
      const form = await server.form([...fields, ['file', server.file('adder-base'), 'model.safetensors']], `?${query}`)
      t.match(form, { status: 200, body: { message: 'Success Weight version updated to a.', upload: { staged: way } } })
      t.same(await server.checksums(), a)
      t.equal((await server.form([['file', server.file('adder'), 'x.safetensors']], `?${query}`)).status, 200)
      t.same(await server.checksums(), b)
      t.equal(server.engine.weightVersion, 'a', 'without a version the label stays')
      t.match(
        await server.form([['file', server.file('adder'), 'x.safetensors'], ['weight_version', 'late']], `?${query}`),
        { status: 200, body: { message: 'Success Weight version updated to late.' } }
      )
      t.equal(server.engine.weightVersion, 'late')
      await server.idle()
    })
  }

  t.test(`a body by ${way} that breaks off anywhere changes nothing, or reports the torn tensors`, async t => {
    const server = await uploadServer(t, { uploadMemoryBytes: memory })
    const file = server.file('adder')
    const { dataStart, tensors } = layout(file)
    const first = await server.checksums()
    const cuts = [
      1,
      7,
      8,
      9,
      100,
      dataStart - 1,
      dataStart,
      dataStart + 1,
      file.length - 1,
      ...[0, 1, 20, 44].flatMap(i => [-1, 0, 1].map(d => tensors[i]!.end + d))
    ]
    for (const cut of cuts) {
      const begun = once(server.app.server, 'request')
      const { request, reply } = post(server.url + PATH + `?weight_version=broken${query}`, {
        'content-type': 'application/octet-stream',
        'content-length': file.length
      })
      request.write(file.subarray(0, cut))
      const [received] = await begun as [IncomingMessage]
      const gone = once(received, 'close').catch(() => {})
      await sleep(15)
      request.destroy()
      t.equal(await reply, null)
      await gone
      await server.idle()
      const { weights } = server.engine
      if (way !== 'stream') t.equal(weights.state, 'current', `cut at ${cut}`)
      if (weights.state === 'torn') {
        const whole = new Set(tensors.filter(({ end }) => end <= cut).map(({ name }) => name))
        t.ok(
          weights.tensors.length > 0 && tensors.every(({ name }) => whole.has(name) || weights.tensors.includes(name)),
          `all that did not come is torn, cut at ${cut}`
        )
        t.match(weights.reason, /broke off after \d+ bytes of 9\d{5}/)
        t.match(await server.generate(), { status: 503, body: { error: { code: 'ENGINE_TORN' } } })
        t.equal((await server.send(server.file('adder-base'), `?weight_version=default${query}`)).status, 200)
      }
      t.same(await server.checksums(), first)
      t.equal(server.engine.weightVersion, 'default')
    }
    t.equal((await server.generate()).status, 200)
  })
}

t.test('with mode=stream a broken body tears tensors, and the reply names them', async t => {
  const server = await uploadServer(t, { uploadMemoryBytes: SMALL, uploadTimeoutMs: 150 })
  const file = server.file('adder')
  // If the machine halts, a body stalls before something is written: try again.
  const stalled = await eventually(async () => {
    const { request, reply } = post(`${server.url}${PATH}?mode=stream`, {
      'content-type': 'application/octet-stream',
      'content-length': file.length
    })
    request.write(file.subarray(0, file.length - 1))
    const answer = await reply
    request.destroy()
    return answer
  }, answer => answer?.status === 500)
  t.match(stalled, {
    status: 500,
    body: {
      success: false,
      error: { code: 'WEIGHTS_TORN', message: /no byte of the body came for 0\.15 s .*Torn: .*Repeat the update/ }
    }
  })
  t.equal(server.engine.weights.state, 'torn')
  // Extra bytes at the end of a body of unknown length: the last piece has been held back.
  const tail = async (): Promise<Reply | null> =>
    await server
      .form([['mode', 'stream'], ['file', Buffer.concat([file, Buffer.alloc(1)]), 'model.safetensors']])
      .catch(() => null)
  const form = await eventually(tail, answer => /more bytes follow/.test(answer?.body.message))
  t.match(form, {
    status: 500,
    body: { error: { code: 'WEIGHTS_TORN', message: /more bytes follow, which no tensor owns/ } }
  })
  t.match(server.engine.weights, { state: 'torn', tensors: [/./] })
  t.equal((await server.sendUntilTaken(file, '?mode=stream')).status, 200)
  t.equal(server.engine.weights.state, 'current')
  await server.idle()
})

t.test('a stalled body is refused after the deadline, and the server answers meanwhile', async t => {
  const server = await uploadServer(t, { uploadTimeoutMs: 200 })
  const file = server.file('adder')
  for (const cut of [0, 5, 500, file.length - 1]) {
    for (const type of ['application/octet-stream', 'multipart/form-data; boundary=x']) {
      const { request, reply } = post(server.url + PATH, { 'content-type': type, 'content-length': file.length })
      const head = type.startsWith('multi')
        ? '--x\r\ncontent-disposition: form-data; name="f"; filename="f.safetensors"\r\n\r\n'
        : ''
      request.write(Buffer.concat([Buffer.from(head), file]).subarray(0, cut))
      if (cut === 0) request.flushHeaders()
      t.equal((await fetch(`${server.url}/health`)).status, 200)
      t.match(await reply, {
        status: 408,
        body: { success: false, error: { code: 'BODY_STALLED', message: /^no byte of the body came for 0\.2 s/ } }
      }, `${type} at ${cut}`)
      request.destroy()
    }
  }
  await server.idle()
  t.equal((await server.sendUntilTaken(file)).status, 200)
})

t.test('a server that was suspended reads the bytes that arrived before it calls a sender stalled', async t => {
  const server = await uploadServer(t, { uploadTimeoutMs: 1000 })
  const file = server.file('adder')
  const { request, reply } = post(server.url + PATH, {
    'content-type': 'application/octet-stream',
    'content-length': file.length
  })
  const begun = once(server.app.server, 'request')
  request.write(file.subarray(0, 500))
  await begun
  await sleep(50) // Waits until the upload is watched.
  // This process is both ends: when it continues, the bytes are in the server's socket, and its timer is due first.
  await setImmediate()
  request.end(file.subarray(500))
  Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 1500)
  t.equal((await reply)?.status, 200)
  await server.idle()
})

t.test('an invalid file, or one of another model, is refused with the reason and nothing changes', async t => {
  for (const memory of [undefined, SMALL]) {
    const server = await uploadServer(t, { uploadMemoryBytes: memory })
    const before = await server.checksums()
    const file = server.file('adder')
    const one = encodeSafetensors([{ name: 'model.norm.weight', dtype: 'F32', shape: [2], data: Buffer.alloc(8) }])
    const huge = Buffer.alloc(64)
    huge.writeBigUInt64LE(99_999_999n)
    const beyond = Buffer.alloc(64)
    beyond.writeBigUInt64LE(1n << 60n)
    const unknown = encodeSafetensors([{ name: 'nobody', dtype: 'F32', shape: [2], data: Buffer.alloc(8) }])
    const double = encodeSafetensors([{ name: 'model.norm.weight', dtype: 'F64', shape: [2], data: Buffer.alloc(16) }])
    const giant = encodeHeader([{ name: 'model.norm.weight', dtype: 'F32', shape: [1 << 30] }])
    const cases: [Uint8Array, code: string, message: RegExp][] = [
      [Buffer.alloc(0), 'CHECKPOINT_FORMAT', /0 bytes are too few/],
      [Buffer.alloc(9), 'CHECKPOINT_FORMAT', /9 bytes are too few|header of 0 bytes/],
      [huge, 'CHECKPOINT_FORMAT', /its header takes 99999999 bytes, but the file has 64|NO_MEMORY/],
      [beyond, 'CHECKPOINT_FORMAT', /at most 100000000/],
      [Buffer.from('x'.repeat(100)), 'CHECKPOINT_FORMAT', /is it a safetensors file/],
      [unknown, 'WEIGHTS_UNKNOWN_NAME', /has no tensor "nobody"/],
      [one, 'WEIGHTS_MISMATCH', /"model.norm.weight" has shape \[2\]/],
      [double, 'CHECKPOINT_FORMAT', /dtype F64 is not supported/],
      [file.subarray(0, file.length - 1), 'CHECKPOINT_FORMAT', /end at byte \d+, but (the file|it) has \d+/],
      [Buffer.concat([file, Buffer.alloc(3)]), 'CHECKPOINT_FORMAT', /no tensor owns/]
    ]
    for (const mode of ['', '?mode=stream']) {
      for (const [bytes, code, message] of cases) {
        const raw = await server.send(bytes, mode)
        t.match(raw, { status: 400, body: { success: false, error: { code, message } } }, `${String(message)} raw`)
        // In a stream of unknown length an invalid end is found only after a write.
        if (mode !== '' && /end at|owns/.test(String(message))) continue
        const form = await server.form([['file', bytes, 'a.safetensors']], mode)
        const big = bytes === huge && memory !== undefined
        t.match(
          form,
          big
            ? { status: 503, body: { error: { code: 'NO_MEMORY' } } }
            : { status: 400, body: { error: { code, message } } },
          `${String(message)} form`
        )
      }
      const { request, reply } = post(server.url + PATH + mode, {
        'content-type': 'application/octet-stream',
        'transfer-encoding': 'chunked'
      })
      request.write(giant)
      t.match(await reply, {
        status: 413,
        body: { error: { code: 'BODY_TOO_LARGE', message: /several times what the model does/ } }
      })
      request.destroy()
    }
    t.match(await server.form([['weight_version', '3']]), {
      status: 400,
      body: { error: { code: 'BODY_BROKEN', message: 'the upload has no file' } }
    })
    t.same(await server.checksums(), before)
    t.equal(server.engine.weightVersion, 'default')
    await server.idle()
  }
})

t.test(
  'several files are one update, duplicate tensors or files are refused, and ' +
    'an index is compared with the files',
  async t => {
    for (const memory of [undefined, SMALL]) {
      const server = await uploadServer(t, { uploadMemoryBytes: memory })
      const before = await server.checksums()
      const file = server.file('adder')
      const { tensors } = layout(file)
      const part = (from: number, to: number): Buffer =>
        encodeSafetensors(
          tensors.slice(from, to).map(({ name, dtype, shape, begin, end }) => ({
            name,
            dtype,
            shape,
            data: file.subarray(begin, end)
          }))
        )
      const [one, two, three] = [part(0, 10), part(10, 45), part(45, 46)]
      const index = (wrong: string): Buffer =>
        Buffer.from(
          JSON.stringify({
            weight_map: Object.fromEntries(tensors
              .map(({ name }, i) => [name, i < 10 ? '1.safetensors' : i < 45 ? '2.safetensors' : wrong]))
          })
        )
      const files: FormParts = [['f', one, '1.safetensors'], ['f', two, '2.safetensors'], ['f', three, '3.safetensors']]
      t.match(await server.form([...files, ['f', part(44, 46), '4.safetensors']]), {
        status: 400,
        body: { error: { message: /4\.safetensors: tensor .* is in 2\.safetensors as well/ } }
      })
      t.match(await server.form([...files, ['f', part(44, 46), '1.safetensors']]), {
        status: 400,
        body: { error: { message: /1\.safetensors: was sent twice/ } }
      })
      t.match(await server.form([['i', index('1.safetensors'), 'model.safetensors.index.json'], ...files]), {
        status: 400,
        body: { error: { message: /should be in 1\.safetensors, but is in 3\.safetensors/ } }
      })
      t.match(await server.form([...files, ['mode', 'stream']]), {
        status: 400,
        body: { error: { message: /mode comes after a file/ } }
      })
      const second = await server.form([['mode', 'stream'], ['allow_missing', 'true'], ...files])
      t.match(second.body.error.message, /2\.safetensors is a second file/)
      // A part of the first file has been written by then if the file has more than one piece.
      t.equal(second.status, memory === undefined ? 400 : 500)
      t.equal(server.engine.weights.state, memory === undefined ? 'current' : 'torn')
      if (memory === undefined) t.same(await server.checksums(), before)
      const reply = await server.form([...files, ['weight_version', '5'], [
        'i',
        index('3.safetensors'),
        'model.safetensors.index.json'
      ]])
      t.match(reply, {
        status: 200,
        body: {
          message: 'Success Weight version updated to 5.',
          report: { tensors: 46, missing_count: 0 },
          upload: { files: 3, staged: memory === undefined ? 'memory' : 'disk' }
        }
      })
      const after = await server.checksums()
      await server.send(server.file('adder-base'))
      await server.send(file)
      t.same(after, await server.checksums())
      // A bucket.
      t.match(await server.form([['allow_missing', 'true'], ['f', three, 'bucket']]), {
        status: 200,
        body: { report: { tensors: 1, missing_count: 45 } }
      })
      await server.idle()
    }
  }
)
