import { createRequire } from 'node:module'
import { existsSync } from 'node:fs'
import { dirname, join } from 'node:path'
import { packageRoot } from '../root.ts'
import { RefitError } from '../errors.ts'
import type { NativeAddon } from './addon.ts'

let loaded: NativeAddon | undefined

function addonPath (): string {
  return process.env.REFIT_NATIVE ?? `${packageRoot}/prebuilds/${process.platform}-${process.arch}/refit.node`
}

/**
 * The CUDA library that the addon opens on the first request for a GPU: `$REFIT_CUDA_LIBRARY`, else the one next to the
 * addon. It may not exist.
 */
export function cudaLibraryPath (): string {
  return process.env.REFIT_CUDA_LIBRARY ?? join(dirname(addonPath()), 'librefit_cuda.so')
}

/**
 * Loads the addon on first use: `$REFIT_NATIVE`, else the binary that `npm run build:native` built for this platform.
 */
export function native (): NativeAddon {
  if (loaded !== undefined) return loaded
  const path = addonPath()
  if (!existsSync(path)) {
    throw new RefitError(
      'NATIVE_MISSING',
      `${path} does not exist; run "npm run build:native" in ${packageRoot} (it needs a C++20 compiler)`
    )
  }
  loaded = createRequire(import.meta.url)(path) as NativeAddon
  return loaded
}
