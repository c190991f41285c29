import { readFileSync } from 'node:fs'
import { request } from 'node:http'
import { createInterface } from 'node:readline'
import { headerLength, parseHeader, PREFIX_BYTES } from '../../src/wire/safetensors/header.ts'
import { encodeHeader } from '../../src/wire/safetensors/encode.ts'

// Sends safetensors files on request, one line of JSON each, and replies with the milliseconds. usage: upload-sender
// FILE FILE

interface Order {
  url: string
  kind: 'bytes' | 'form'
  tensors: number
  file: number
}

const CHUNK = 1 << 20
const files = process.argv.slice(2).map(path => readFileSync(path))

/** The bytes of a body: all of a file, or a file of its first tensors. */
function body ({ kind, tensors, file }: Order): Buffer[] {
  const whole = files[file]!
  const parts = tensors === 0 ? [whole] : first(whole, tensors)
  if (kind === 'bytes') return parts
  return [
    Buffer.from('--border\r\ncontent-disposition: form-data; name="file"; filename="model.safetensors"\r\n\r\n'),
    ...parts,
    Buffer.from('\r\n--border--\r\n')
  ]
}

function first (whole: Buffer, count: number): Buffer[] {
  const length = headerLength(whole, whole.length, 'file')
  const tensors = parseHeader(whole.subarray(PREFIX_BYTES, PREFIX_BYTES + length), whole.length, 'file').tensors.slice(
    0,
    count
  )
  return [encodeHeader(tensors), whole.subarray(tensors[0]!.begin, tensors.at(-1)!.end)]
}

async function send (order: Order): Promise<object> {
  const parts = body(order)
  const bytes = parts.reduce((sum, part) => sum + part.length, 0)
  const start = performance.now()
  const type = order.kind === 'bytes' ? 'application/octet-stream' : 'multipart/form-data; boundary=border'
  const sending = request(order.url, { method: 'POST', headers: { 'content-type': type, 'content-length': bytes } })
  const reply = new Promise<string>((resolve, reject) => {
    sending.on('error', reject).on('response', response => {
      let text = ''
      response
        .on('data', data => {
          text += String(data)
        })
        .on('end', () => {
          response.statusCode === 200 ? resolve(text) : reject(new Error(text))
        })
    })
  })
  for (const part of parts) {
    for (let at = 0; at < part.length; at += CHUNK) {
      if (!sending.write(part.subarray(at, at + CHUNK))) await new Promise(resolve => sending.once('drain', resolve))
    }
  }
  sending.end()
  await reply
  return { ms: performance.now() - start, bytes }
}

for await (const line of createInterface({ input: process.stdin })) {
  process.stdout.write(`${JSON.stringify(await send(JSON.parse(line) as Order))}\n`)
}
