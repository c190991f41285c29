import { Type } from 'typebox'
import type { FastifyRequest } from 'fastify'
import type { WriteReport } from '../../contract/weight-source.ts'
import { RefitError } from '../../errors.ts'
import type { Upload, UploadPlace } from '../../sources/upload/upload.ts'
import { requireTurn, runUpdate } from '../../updates/run-update.ts'
import type { WriteSource } from '../../updates/run-update.ts'
import type { UpdatesContext } from '../context.ts'
import { labelText, toUpdateFields } from '../updates/update-fields.ts'
import { sendContinue } from './expect-continue.ts'
import { IndexFile } from './index-file.ts'
import { UploadForm } from './upload-fields.ts'
import { readForm } from './upload-form.ts'
import { dropRest, pump } from './upload-pump.ts'
import { BYTES, uploadType } from './upload-types.ts'

/** How an upload was received, for replies. */
export const UploadReport = Type.Object({
  files: Type.Integer(),
  bytes: Type.Integer({ description: 'Bytes of tensors.' }),
  staged: Type.String({
    description: 'The place where the bytes waited for the write: "memory" or "disk"; "stream": they did not wait.'
  }),
  receive_ms: Type.Number({
    description:
      'Time from the arrival of the request until the whole body was received; of a stream, until its header was.'
  })
}, { title: 'UploadReport' })

export interface UploadOutcome {
  message: string
  report: WriteReport
  torn: number
  upload: { files: number, bytes: number, staged: UploadPlace, receive_ms: number }
}

const INDEX = '.safetensors.index.json'

/** Receives the safetensors files of a body, writes them as one update, and replies as an update from tensors does. */
export async function updateFromUpload (context: UpdatesContext, request: FastifyRequest): Promise<UploadOutcome> {
  const { transaction } = request.query as { transaction?: unknown }
  let body: UploadBody | undefined
  // The fields of a form arrive while its files are read, so they are read when they are needed.
  const options = () => ({
    ...body === undefined
      ? { transaction: typeof transaction === 'string' ? transaction : null }
      : toUpdateFields(body.form.fields),
    isWhole: true,
    check: requireWeights,
    failurePrefix: 'Failed to update weights: '
  })
  const { report, torn } = await runUpdate(context, options, async write => {
    body = new UploadBody(context, request)
    return await body.receive(write)
  })
  const { form, upload, receiveMs } = body!
  return {
    message: `Success${labelText(form.fields.weight_version, report)}`,
    report,
    torn,
    upload: { files: upload!.files, bytes: upload!.bytes, staged: upload!.place, receive_ms: receiveMs }
  }
}

/** In a transaction an upload may hold only tensors that the model does not use: a tied head in a bucket of its own. */
function requireWeights ({ tensors, ignored, transaction }: WriteReport): void {
  if (tensors > 0 || transaction !== undefined) return
  throw new RefitError(
    'WEIGHTS_INCOMPLETE',
    `the upload contains no weight of this model (${ignored.length} tensors that the model does not use)`
  )
}

/** One request body that contains files, from its head to its end. */
class UploadBody {
  readonly form: UploadForm
  upload: Upload | undefined
  receiveMs = 0
  readonly #context: UpdatesContext
  readonly #request: FastifyRequest
  readonly #control = new AbortController()
  readonly #began = performance.now()

  constructor (context: UpdatesContext, request: FastifyRequest) {
    this.#context = context
    this.#request = request
    this.form = new UploadForm(request.query as Record<string, unknown>)
  }

  async receive (write: WriteSource): Promise<WriteReport> {
    const { uploads, engine } = this.#context
    const { form } = this
    const isForm = uploadType(this.#request) !== BYTES
    const length = await this.#checkHead(isForm)
    const upload = this.upload = uploads.open({
      isStream: () => form.streams,
      maxBytes: mostBytes(engine.info.weightBytes)
    })
    sendContinue(this.#request.raw)
    const reading = isForm ? this.#readParts(upload) : this.#readBytes(upload, length)
    // The outcome of the reading is awaited below, after the write that runs beside it.
    reading.catch(error => {
      upload.fail(error)
    })
    try {
      const source = await Promise.race([upload.opened, reading])
      this.receiveMs = performance.now() - this.#began
      if (form.unknown.length > 0) {
        this.#request.log.info({ fields: form.unknown }, 'unknown fields of an upload ignored')
      }
      const report = await write(source)
      await reading
      return report
    } catch (error) {
      this.#control.abort(error)
      await reading.catch(() => {})
      dropRest(this.#request.raw)
      throw error
    } finally {
      await upload.close()
    }
  }

  /**
   * Refuses what can be refused before the client sends the body. Returns its length, null if the client does not state
   * it.
   */
  async #checkHead (isForm: boolean): Promise<number | null> {
    const { engine, uploads } = this.#context
    const { fields, streams } = this.form
    const length = lengthOf(this.#request)
    // A form may name its transaction later.
    if (!isForm || fields.transaction != null) await requireTurn(engine, fields.transaction)
    if (length !== null && !streams) await uploads.checkRoom(length)
    return length
  }

  #pumpOptions (upload: Upload) {
    const { uploads } = this.#context
    return {
      stallMs: uploads.stallMs,
      signal: this.#control.signal,
      broke: (error: unknown): void => {
        upload.fail(error)
      },
      spent: (chunk: Buffer): void => {
        uploads.freeChunk(chunk)
      }
    }
  }

  async #readBytes (upload: Upload, length: number | null): ReturnType<Upload['finish']> {
    this.form.begin()
    const file = upload.begin('the body', length)
    await pump(this.#request.raw, { take: chunk => file.take(chunk), ...this.#pumpOptions(upload) })
    await file.end()
    return await upload.finish()
  }

  async #readParts (upload: Upload): ReturnType<Upload['finish']> {
    const { form } = this
    const index = new IndexFile()
    await readForm(this.#request, {
      ...this.#pumpOptions(upload),
      field: (name, value) => {
        form.add(name, value)
      },
      file: name => {
        form.begin()
        this.#checkTurn()
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

  /** A form whose transaction is known is refused before its file has come. */
  #checkTurn (): void {
    const { streams, fields } = this.form
    if (!streams && fields.transaction == null) return
    requireTurn(this.#context.engine, fields.transaction).catch(error => {
      this.#control.abort(error)
    })
  }
}

/** The stated length of a body, null without one. Throws UNSUPPORTED for a compressed body. */
function lengthOf ({ headers }: FastifyRequest): number | null {
  const encoding = headers['content-encoding']
  if (encoding !== undefined && encoding !== 'identity') {
    throw new RefitError(
      'UNSUPPORTED',
      `content-encoding ${JSON.stringify(encoding.slice(0, 100))} is not accepted here: send the bytes uncompressed`,
      { param: 'content-encoding' }
    )
  }
  return headers['content-length'] === undefined ? null : Number(headers['content-length'])
}

/** float32 for bfloat16 is twice the size, and unused tensors add some; a larger upload is not for this model. */
function mostBytes (weightBytes: number): number {
  return 4 * weightBytes + (1 << 30)
}
