import { RefitError } from '../errors.ts'
import type { NativeAddon } from './addon.ts'

type Call = (...args: unknown[]) => unknown

/**
 * The addon with every asynchronous call guarded: if one rejects because its device is lost, `lost` is called and the
 * call rejects with DEVICE_LOST. Errors that a call throws synchronously pass: nothing was started.
 */
export function guardedAddon (addon: NativeAddon, lost: (message: string) => void): NativeAddon {
  const rethrow = (error: unknown): never => {
    if ((error as { code?: unknown }).code !== 'DEVICE_LOST') throw error
    const { message } = error as Error
    lost(message)
    throw new RefitError('DEVICE_LOST', message, { cause: error })
  }
  const guard = (call: Call): Call => (...args) => {
    const result = call(...args)
    return result instanceof Promise ? result.catch(rethrow) : result
  }
  const entries = Object
    .entries(addon)
    .map(([name, value]) => [name, typeof value === 'function' ? guard(value as Call) : value])
  return Object.fromEntries(entries) as NativeAddon
}
