import type { Multipart, MultipartFile } from '@fastify/multipart'
import type { FastifyRequest } from 'fastify'
import { RefitError } from '../../errors.ts'
import { isOurs } from './upload-pump.ts'
import type { PumpOptions } from './upload-pump.ts'
import { watchBody } from './upload-watch.ts'

// Every call names all of the limits, because a host's @fastify/multipart has defaults of the host's. Files have no
// limit of their own here: their announced size is checked against the model, and their bytes are counted.
const LIMITS = {
  files: 4096,
  fields: 100,
  parts: 5000,
  fieldNameSize: 100,
  fieldSize: 65536,
  headerPairs: 20,
  headerSize: 16384,
  fileSize: Infinity
}
const OPTIONS = {
  limits: LIMITS,
  throwFileSizeLimit: true,
  highWaterMark: 1 << 20,
  // Each file that waits for its turn may buffer this much, so that many small files stay within bounds; the file that
  // is read never buffers much.
  fileHwm: 1 << 16,
  defCharset: 'utf8',
  preservePath: false,
  isPartAFile: (_name: unknown, type: string | undefined, file: string | undefined) =>
    type === 'application/octet-stream' || file !== undefined
}

/** Receives the bytes of one file. */
export interface FormFile {
  take: (chunk: Uint8Array) => Promise<void> | undefined
  end: () => Promise<void>
}

export interface FormOptions extends Pick<PumpOptions, 'stallMs' | 'broke' | 'signal' | 'spent'> {
  field: (name: string, value: unknown) => void
  file: (name: string) => FormFile
}

/**
 * Reads a multipart/form-data body: fields and files, in their order, each after the one before it has ended. Rejects
 * with the error of a callback, or with BODY_BROKEN, BODY_STALLED or BODY_TOO_LARGE. After that no part of the body is
 * being processed.
 */
export async function readForm (
  request: FastifyRequest,
  { field, file, stallMs, broke, signal, spent }: FormOptions
): Promise<void> {
  const { raw } = request
  const control = new AbortController()
  const failed = new Promise<never>((_resolve, reject) => {
    control.signal.addEventListener('abort', () => {
      reject(control.signal.reason)
    })
  })
  const fail = (error: unknown): void => {
    if (control.signal.aborted) return
    raw.unpipe().pause()
    control.abort(error)
    broke(error)
  }
  failed.catch(() => {})
  // Nothing else marks the request as a form: see `installFormParser`.
  request.isMultipart = () => true
  const parts = request.parts(OPTIONS)
  const read = async (): Promise<IteratorResult<Multipart>> =>
    await parts.next().catch(error => {
      throw refusal(error)
    })
  // The request for the first part starts the parser, before the watch can take a byte from it.
  let next = read()
  const stop = watchBody(raw, {
    stallMs,
    signal,
    ended: error => {
      if (error !== undefined) fail(error)
    }
  })
  try {
    for (;;) {
      const { value: part, done } = await Promise.race([next, failed])
      control.signal.throwIfAborted()
      if (done === true) return
      if (part.type === 'file') {
        await readFile(part.file, file(part.filename ?? part.fieldname ?? 'a file without a name'), {
          signal: control.signal,
          fail,
          free: chunk => {
            if (isOurs(raw)) spent(chunk)
          }
        })
      } else {
        if (part.valueTruncated) {
          throw new RefitError(
            'BODY_TOO_LARGE',
            `the field ${JSON.stringify(String(part.fieldname).slice(0, 100))} is longer than ${LIMITS.fieldSize} bytes`
          )
        }
        field(String(part.fieldname), part.value)
      }
      next = read()
    }
  } catch (error) {
    fail(error)
    throw control.signal.reason
  } finally {
    stop()
  }
}

/** If something fails while a file is received, the end of the file is awaited, so that its owner may close it. */
async function readFile (
  stream: MultipartFile['file'],
  file: FormFile,
  { signal, fail, free }: { signal: AbortSignal, fail: (error: unknown) => void, free: (chunk: Buffer) => void }
): Promise<void> {
  let pending: Promise<void> | undefined
  await new Promise<void>((resolve, reject) => {
    let failure: unknown
    const settle = (error?: unknown): void => {
      stream.off('data', onData).off('end', settle).off('error', onError)
      signal.removeEventListener('abort', onAbort)
      failure ??= error
      const after = (): void => {
        failure === undefined ? resolve() : reject(failure)
      }
      if (pending === undefined) after()
      else pending.then(after, after)
    }
    const onAbort = (): void => {
      settle(signal.reason)
    }
    const onError = (error: unknown): void => {
      fail(refusal(error))
    }
    const onData = (chunk: Buffer): void => {
      try {
        pending = file.take(chunk)
      } catch (error) {
        return settle(error)
      }
      if (pending === undefined) return free(chunk)
      stream.pause()
      pending.then(() => {
        pending = undefined
        free(chunk)
        if (!signal.aborted) stream.resume()
      }, (error: unknown) => {
        pending = undefined
        settle(error)
      })
    }
    signal.addEventListener('abort', onAbort)
    stream.on('error', onError).on('end', settle).on('data', onData)
    if (signal.aborted) onAbort()
    // The stream broke while it waited for its turn, and reported its error then.
    else if (stream.destroyed) onError(stream.errored)
  })
  await file.end()
}

/** The client's error for an error of the parser. */
function refusal (error: unknown): RefitError {
  const { code, message } = error as NodeJS.ErrnoException
  for (const what of ['parts', 'files', 'fields'] as const) {
    if (code === `FST_${what.toUpperCase()}_LIMIT`) {
      return new RefitError('BODY_TOO_LARGE', `the form has more than ${LIMITS[what]} ${what}`)
    }
  }
  return new RefitError('BODY_BROKEN', `the body is no well-formed multipart/form-data (${message})`)
}
