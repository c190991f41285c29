import { RefitError } from '../errors.ts'
import type { NativeAddon } from './addon.ts'

/** The addon, with `lost` called (and DEVICE_LOST thrown) where an operation on weights or memory finds its device lost. */
export function guardedAddon (addon: NativeAddon, lost: (message: string) => void): NativeAddon {
  // Not async: what is refused at once is thrown at once, and has touched nothing.
  const guard = <A extends unknown[], T>(operation: (...args: A) => Promise<T>) => (...args: A): Promise<T> =>
    operation(...args).catch((error: unknown) => {
      if ((error as { code?: unknown }).code !== 'DEVICE_LOST') throw error
      const { message } = error as Error
      lost(message)
      throw new RefitError('DEVICE_LOST', message, { cause: error })
    })
  return {
    ...addon,
    write: guard(addon.write),
    read: guard(addon.read),
    checksum: guard(addon.checksum),
    scramble: guard(addon.scramble),
    release: guard(addon.release),
    resume: guard(addon.resume),
    closeMappings: guard(addon.closeMappings),
    fetch: guard(addon.fetch),
    ncclConnect: guard(addon.ncclConnect),
    stageGroup: guard(addon.stageGroup),
    groupReceive: guard(addon.groupReceive),
    groupBegin: guard(addon.groupBegin),
    groupArrive: guard(addon.groupArrive),
    groupReceiveInPlace: guard(addon.groupReceiveInPlace),
    groupRead: guard(addon.groupRead),
    groupSend: guard(addon.groupSend),
    groupParams: guard(addon.groupParams),
    groupBarrier: guard(addon.groupBarrier),
    endGroup: guard(addon.endGroup)
  }
}
