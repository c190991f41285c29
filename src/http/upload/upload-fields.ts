import { Type } from 'typebox'
import type { Static } from 'typebox'
import { RefitError } from '../../errors.ts'
import { nullable } from '../schemas.ts'
import { allowMissingField, updateFields } from '../updates/update-fields.ts'
import { bodyCheck } from '../validation.ts'

const MODE =
  'null: the whole body is received before the first byte is written. "stream": the body is written as it arrives; ' +
  'if it breaks off, the error names the torn tensors.'

export const UploadFields = Type.Object({
  ...updateFields,
  allow_missing: allowMissingField,
  mode: nullable(Type.String(), MODE),
  load_format: nullable(Type.String(), 'null or "safetensors".')
}, { title: 'UploadFields' })

export type UploadFields = Static<typeof UploadFields>

const check = bodyCheck(UploadFields)
/** Fields that must come before the first byte of a file. */
const EARLY = ['mode', 'load_format'] as const
/** Fields that must come before a file that is written as it comes. */
const EARLY_IN_STREAMS = ['abort_all_requests', 'allow_missing', 'transaction', 'swap', 'on_running'] as const

/** The fields of one upload as they come: those of the query, then those of the form. */
export class UploadForm {
  /** Checked; more fields are added as they come. */
  readonly fields: UploadFields = {}
  readonly unknown: string[] = []
  readonly #seen = new Set<string>()
  #begun = false

  constructor (query: object) {
    for (const [name, value] of Object.entries(query)) this.#set(name, value)
  }

  get streams (): boolean {
    return this.fields.mode === 'stream'
  }

  /**
   * Adds a field of the form: a text, or a JSON value if the field has JSON's type. Throws INVALID_REQUEST or
   * UNSUPPORTED.
   */
  add (name: string, value: unknown): void {
    if (this.#seen.has(name)) {
      throw new RefitError(
        'INVALID_REQUEST',
        `the field ${JSON.stringify(name.slice(0, 100))} comes twice`,
        { param: name.slice(0, 100) }
      )
    }
    this.#seen.add(name)
    const early: readonly string[] = this.streams ? [...EARLY, ...EARLY_IN_STREAMS] : EARLY
    if (this.#begun && early.includes(name)) {
      throw new RefitError('INVALID_REQUEST', `${name} comes after a file; send it before the files`, {
        param: name
      })
    }
    this.#set(name, value)
  }

  /** A file begins. */
  begin (): void {
    this.#begun = true
  }

  #set (name: string, value: unknown): void {
    if (!Object.hasOwn(UploadFields.properties, name)) {
      if (this.unknown.length < 100) this.unknown.push(name.slice(0, 100))
      return
    }
    const checked = check({ [name]: value })
    if ('error' in checked) throw checked.error
    Object.assign(this.fields, checked.value)
    const { mode, load_format: format } = this.fields
    if (mode != null && mode !== 'stream') {
      throw new RefitError(
        'UNSUPPORTED',
        `mode: expected "stream" or nothing, got ${JSON.stringify(mode.slice(0, 100))}`,
        { param: 'mode' }
      )
    }
    if (format != null && format !== 'safetensors') {
      throw new RefitError(
        'UNSUPPORTED',
        `load_format: uploads are safetensors files; expected "safetensors" or nothing, got ${
          JSON.stringify(format.slice(0, 100))
        }`,
        { param: 'load_format' }
      )
    }
  }
}
