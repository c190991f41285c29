import { existsSync, readFileSync, writeFileSync } from 'node:fs'
import { createRequire } from 'node:module'
import { setFlagsFromString } from 'node:v8'
import { Script } from 'node:vm'

/**
 * Runs the program that code-cache.js wrote as `${path}.cjs`, with the functions that V8 compiled when the cache was
 * made. Returns its exports. `importModule`: what it calls for `import`.
 */
export function runCached (path, importModule) {
  const cache = `${path}.cache`
  const isMaking = process.env.MAKE_CODE_CACHE === path
  const script = new Script(readFileSync(`${path}.cjs`, 'utf8'), {
    filename: `${path}.cjs`,
    cachedData: !isMaking && existsSync(cache) ? readFileSync(cache) : undefined
  })
  if (isMaking) {
    // Functions that have run by then are in the cache.
    process.once('exit', () => {
      // V8 rejects a cache made with other flags than those of its reader, which has not set this one yet
      // (src/engine/old-garbage.ts).
      setFlagsFromString('--heap-growing-percent=0')
      writeFileSync(cache, script.createCachedData())
    })
  }
  const module = { exports: {} }
  script.runInThisContext()(createRequire(`${path}.cjs`), module, module.exports, importModule)
  return module.exports
}
