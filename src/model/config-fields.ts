import { RefitError } from '../errors.ts'

type Json = Record<string, unknown>

/** Error MODEL_CONFIG at a field of config.json. */
export function configError (field: string, message: string): RefitError {
  return new RefitError('MODEL_CONFIG', `config.json: ${field}: ${message}`, { param: field })
}

export function isObject (value: unknown): value is Json {
  return typeof value === 'object' && value !== null && !Array.isArray(value)
}

/** A value of a config file for an error message, cut to 80 characters. */
export function show (value: unknown): string {
  const text = value === undefined ? 'nothing' : JSON.stringify(value) ?? String(value)
  return text.length > 80 ? `${text.slice(0, 80)}...` : text
}

/** Typed access to the fields of one JSON object; a wrong type or range is an error that names the field. */
export class ConfigFields {
  readonly #json: Json
  readonly #prefix: string

  constructor (json: Json, prefix = '') {
    this.#json = json
    this.#prefix = prefix
  }

  /** The raw value; JSON null counts as absent. */
  get (name: string): unknown {
    return this.#json[name] ?? undefined
  }

  has (name: string): boolean {
    return Object.hasOwn(this.#json, name)
  }

  field (name: string): string {
    return this.#prefix + name
  }

  error (name: string, message: string): RefitError {
    return configError(this.field(name), message)
  }

  /** An integer in [min, max]. An absent field has the fallback's value; without a fallback it is an error. */
  int (name: string, min: number, max: number, fallback?: number): number {
    const value = this.get(name) ?? fallback
    if (value === undefined) throw this.error(name, 'is missing')
    if (!Number.isSafeInteger(value)) throw this.error(name, `expected an integer, got ${show(value)}`)
    if ((value as number) < min || (value as number) > max) {
      throw this.error(name, `expected ${min} to ${max}, got ${show(value)}`)
    }
    return value as number
  }

  /** A finite number above `above`. */
  number (name: string, above: number, fallback?: number): number {
    const value = this.get(name) ?? fallback
    if (value === undefined) throw this.error(name, 'is missing')
    if (typeof value !== 'number' || !Number.isFinite(value)) {
      throw this.error(name, `expected a number, got ${show(value)}`)
    }
    if (value <= above) throw this.error(name, `expected a number above ${above}, got ${value}`)
    return value
  }

  boolean (name: string, fallback: boolean): boolean {
    const value = this.get(name) ?? fallback
    if (typeof value !== 'boolean') throw this.error(name, `expected true or false, got ${show(value)}`)
    return value
  }

  string (name: string): string | undefined {
    const value = this.get(name)
    if (value !== undefined && typeof value !== 'string') {
      throw this.error(name, `expected a string, got ${show(value)}`)
    }
    return value
  }

  /** A list of integers in [min, max]. */
  ints (name: string, min: number, max: number): number[] {
    const value = this.get(name) ?? []
    if (!Array.isArray(value)) throw this.error(name, `expected a list of integers, got ${show(value)}`)
    for (const item of value) {
      if (!Number.isSafeInteger(item) || item < min || item > max) {
        throw this.error(name, `expected integers from ${min} to ${max}, got ${show(item)}`)
      }
    }
    return value as number[]
  }
}
