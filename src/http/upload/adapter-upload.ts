import type { FastifyRequest } from 'fastify'
import type { AdapterReport } from '../../contract/adapters.ts'
import { RefitError } from '../../errors.ts'
import type { Upload } from '../../sources/upload/upload.ts'
import { loadAdapterFromSource, requireAdapters } from '../../updates/adapter-load.ts'
import type { AdapterFields } from '../../updates/adapter-load.ts'
import type { UpdatesContext } from '../context.ts'
import { checkJsonCost, mostPoints } from '../json-cost.ts'
import { sendContinue } from './expect-continue.ts'
import { readForm } from './upload-form.ts'
import type { FormFile } from './upload-form.ts'
import { dropRest } from './upload-pump.ts'
import { FORM, uploadType } from './upload-types.ts'

const CONFIG = 'adapter_config.json'
const WEIGHTS = 'adapter_model.safetensors'
const MAX_CONFIG_BYTES = 4 << 20
/** An adapter of rank 1024 of all experts is smaller than its model. */
const SMALLEST_LIMIT = 1 << 30

/** Receives both files of an adapter as a form, and loads it. */
export async function loadAdapterFromForm (
  context: UpdatesContext,
  request: FastifyRequest,
  fields: AdapterFields
): Promise<AdapterReport> {
  requireAdapters(context.engine)
  if (uploadType(request) !== FORM) {
    throw new RefitError(
      'INVALID_REQUEST',
      `expected a form (${FORM}) with the files ${CONFIG} and ${WEIGHTS}, such as curl -F file=@${CONFIG} -F ` +
        `file=@${WEIGHTS}`
    )
  }
  const { uploads, engine } = context
  const upload = uploads.open({
    isStream: () => false,
    maxBytes: Math.max(engine.info.weightBytes, SMALLEST_LIMIT)
  })
  const config = new ConfigFile()
  const control = new AbortController()
  try {
    sendContinue(request.raw)
    await readForm(request, {
      stallMs: uploads.stallMs,
      signal: control.signal,
      broke: error => {
        upload.fail(error)
      },
      spent: chunk => {
        uploads.freeChunk(chunk)
      },
      field: name => {
        throw unknownPart(name)
      },
      file: name => fileOf(name, upload, config)
    })
    return await loadAdapterFromSource(context, fields, {
      config: config.value,
      open: async () => await upload.finish()
    })
  } catch (error) {
    control.abort(error)
    dropRest(request.raw)
    throw error
  } finally {
    await upload.close()
  }
}

function fileOf (name: string, upload: Upload, config: ConfigFile): FormFile {
  if (name === CONFIG) return config
  if (name === WEIGHTS) return upload.begin(name, null)
  throw unknownPart(name)
}

function unknownPart (name: string): RefitError {
  return new RefitError(
    'INVALID_REQUEST',
    `the form has ${JSON.stringify(name.slice(0, 100))}; an adapter is the files ${CONFIG} and ${WEIGHTS}`,
    { param: name.slice(0, 100) }
  )
}

class ConfigFile implements FormFile {
  readonly #chunks: Buffer[] = []
  #bytes = 0
  #value: { json: unknown } | undefined

  get value (): unknown {
    if (this.#value !== undefined) return this.#value.json
    throw new RefitError('INVALID_REQUEST', `the form has no ${CONFIG}`, { param: CONFIG })
  }

  take (chunk: Uint8Array): undefined {
    if (this.#value !== undefined) throw new RefitError('INVALID_REQUEST', `${CONFIG} was sent twice`)
    this.#bytes += chunk.length
    if (this.#bytes > MAX_CONFIG_BYTES) {
      throw new RefitError('BODY_TOO_LARGE', `${CONFIG} has more than ${MAX_CONFIG_BYTES} bytes`)
    }
    // The memory of the chunk is used again.
    this.#chunks.push(Buffer.from(chunk))
  }

  async end (): Promise<void> {
    const bytes = Buffer.concat(this.#chunks)
    await checkJsonCost(bytes, mostPoints('normal'))
    try {
      this.#value = { json: JSON.parse(String(bytes)) }
    } catch (error) {
      throw new RefitError('CHECKPOINT_FORMAT', `${CONFIG} is no JSON: ${(error as Error).message.slice(0, 200)}`)
    }
  }
}
