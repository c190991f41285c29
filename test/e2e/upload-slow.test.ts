import { request } from 'node:http'
import { readFileSync } from 'node:fs'
import { join } from 'node:path'
import { setTimeout as sleep } from 'node:timers/promises'
import t from 'tap'
import { modelFolder, serve } from '../helpers/load-from.ts'

t.test('an upload that trickles blocks other updates for no longer than it may be silent', {
  timeout: 60_000
}, async t => {
  const { url, post } = await serve(t, 'adder-base', {}, { uploadTimeoutMs: 500 })
  const file = readFileSync(join(modelFolder('adder'), 'model.safetensors'))
  const header = 8 + Number(file.readBigUInt64LE(0))
  const sender = request(`${url}/update_weights_from_tensor?mode=stream`, {
    method: 'POST',
    headers: { 'content-type': 'application/octet-stream', 'content-length': file.length }
  })
  const status = new Promise<number | undefined>(resolve => {
    sender
      .on('response', reply => {
        resolve(reply.statusCode)
        reply.resume()
      })
      .on('error', () => {
        resolve(undefined)
      })
  })
  sender.write(file.subarray(0, header))
  let at = header
  const drip = setInterval(() => {
    sender.write(file.subarray(at, ++at))
  }, 300)
  await sleep(300)
  t.match(await post('/update_weights_from_disk', { model_path: modelFolder('adder') }), { status: 200 })
  clearInterval(drip)
  sender.destroy()
  t.not(await status, 200)
})
