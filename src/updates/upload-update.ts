import { Type } from 'typebox'
import type { FastifyRequest } from 'fastify'
import { RefitError } from '../errors.ts'
import type { UploadPlace } from '../sources/upload/upload.ts'
import type { WriteReport } from '../contract/weight-source.ts'
import { applySource, demandTurn, labelText, measured, openedFor, tornCount } from './apply-source.ts'
import type { RouteContext } from '../http/context.ts'
import { sendContinue } from '../http/upload/expect-continue.ts'
import { UploadForm } from '../http/upload/upload-fields.ts'
import { readForm } from '../http/upload/upload-form.ts'
import { dropRest, pump } from '../http/upload/upload-pump.ts'
import { BYTES, uploadType } from '../http/upload/upload-types.ts'

/** How an upload came in, as replies tell it. */
export const UploadReport = Type.Object({
  files: Type.Integer(),
  bytes: Type.Integer({ description: 'Of tensors.' }),
  staged: Type.String({
    description:
      'Where the bytes waited for the write: "memory", "disk", or "stream" for one that was written as it came.'
  }),
  receive_ms: Type.Number({
    description:
      'From the first look at the request until all of the body was there; of a stream, until its header was.'
  })
}, { title: 'UploadReport' })

export interface UploadOutcome {
  message: string
  report: WriteReport
  torn: number
  upload: { files: number, bytes: number, staged: UploadPlace, receive_ms: number }
}

const INDEX = '.safetensors.index.json'

/** Takes the safetensors files of a body, writes them as one update, and answers as an update from tensors does. */
export async function updateFromUpload (context: RouteContext, request: FastifyRequest): Promise<UploadOutcome> {
  return await measured(context.metrics, async () => {
    const { uploads, engine } = context
    const { raw } = request
    const began = performance.now()
    const isForm = uploadType(request) !== BYTES
    const query = request.query as Record<string, unknown>
    const { form, length } = await openedFor(engine, {
      transaction: typeof query.transaction === 'string' ? query.transaction : null
    }, async () => {
      const form = new UploadForm(query)
      const length = checkHead(request)
      // A form may name its transaction later.
      if (!isForm || form.fields.transaction != null) await demandTurn(engine, form.fields)
      if (length !== null && !form.streams) await uploads.checkRoom(length)
      return { form, length }
    })
    const upload = uploads.open({ isStream: () => form.streams, maxBytes: mostBytes(engine.info.weightBytes) })
    const control = new AbortController()
    const read = isForm ? readParts : readBytes
    sendContinue(raw)
    const reading = read()
    // Its outcome is looked at below, when the write that goes on beside it has ended.
    reading.catch(error => {
      upload.fail(error)
    })
    try {
      const source = await openedFor(engine, form.fields, async () => await Promise.race([upload.opened, reading]))
      const receiveMs = performance.now() - began
      if (form.unknown.length > 0) request.log.info({ fields: form.unknown }, 'unknown fields of an upload ignored')
      const report = await applySource(engine, source, form.fields, { allowTorn: true })
      await reading
      return {
        message: `Success${labelText(form.fields.weight_version, report)}`,
        report,
        torn: tornCount(engine),
        upload: { files: upload.files, bytes: upload.bytes, staged: upload.place, receive_ms: receiveMs }
      }
    } catch (error) {
      control.abort(error)
      await reading.catch(() => {})
      dropRest(raw)
      throw error
    } finally {
      await upload.close()
    }

    function broke (error: unknown): void {
      upload.fail(error)
    }
    function spent (chunk: Buffer): void {
      uploads.freeChunk(chunk)
    }

    async function readBytes (): ReturnType<typeof upload.finish> {
      form.begin()
      const file = upload.begin('the body', length)
      await pump(raw, {
        take: chunk => file.take(chunk),
        stallMs: uploads.stallMs,
        broke,
        spent,
        signal: control.signal
      })
      await file.end()
      return await upload.finish()
    }

    async function readParts (): ReturnType<typeof upload.finish> {
      const index = new IndexFile()
      await readForm(request, {
        stallMs: uploads.stallMs,
        broke,
        spent,
        signal: control.signal,
        field: (name, value) => {
          form.add(name, value)
        },
        file: name => {
          form.begin()
          // Answered before the file has come.
          if (form.streams || form.fields.transaction != null) {
            demandTurn(engine, form.fields).catch(error => {
              control.abort(error)
            })
          }
          if (!name.endsWith(INDEX)) return upload.begin(name, null)
          if (form.streams) {
            throw new RefitError('UNSUPPORTED', `${name}: with mode=stream a request has one file and no index`, {
              param: 'mode'
            })
          }
          return index.begin(name)
        }
      })
      return await upload.finish(index.whole)
    }
  })
}

/** What can be known before the body: its length, null where that is not said. */
function checkHead ({ headers }: FastifyRequest): number | null {
  const encoding = headers['content-encoding']
  if (encoding !== undefined && encoding !== 'identity') {
    throw new RefitError(
      'UNSUPPORTED',
      `content-encoding ${JSON.stringify(encoding.slice(0, 100))} is not taken here: send the bytes as they are`,
      { param: 'content-encoding' }
    )
  }
  return headers['content-length'] === undefined ? null : Number(headers['content-length'])
}

/** float32 for bfloat16 is twice, tensors that the model has no use for are some more; anything beyond is not for this model. */
function mostBytes (weightBytes: number): number {
  return 4 * weightBytes + (1 << 30)
}

const MAX_INDEX_BYTES = 64 << 20

/** The index of a sharded checkpoint, which is small. */
class IndexFile {
  #label: string | undefined
  #bytes = Buffer.alloc(0)
  #length = 0

  get whole (): { label: string, json: Uint8Array } | undefined {
    return this.#label === undefined ? undefined : { label: this.#label, json: this.#bytes.subarray(0, this.#length) }
  }

  begin (label: string): { take: (chunk: Uint8Array) => undefined, end: () => Promise<void> } {
    if (this.#label !== undefined) throw new RefitError('INVALID_REQUEST', `${label} is a second index`)
    this.#label = label
    return {
      take: chunk => {
        const length = this.#length + chunk.length
        if (length > MAX_INDEX_BYTES) {
          throw new RefitError('BODY_TOO_LARGE', `${label} is longer than ${MAX_INDEX_BYTES} bytes`)
        }
        if (length > this.#bytes.length) {
          const larger = Buffer.allocUnsafeSlow(Math.max(2 * length, 1 << 20))
          this.#bytes.copy(larger)
          this.#bytes = larger
        }
        this.#bytes.set(chunk, this.#length)
        this.#length = length
      },
      end: async () => {}
    }
  }
}
