import { build } from 'esbuild'
import { spawn } from 'node:child_process'
import { once } from 'node:events'
import { readFileSync, writeFileSync } from 'node:fs'
import { resolve } from 'node:path'
import { createInterface } from 'node:readline'

// V8's code cache for the command line. Node.js 20 compiles ES modules anew in each process, so the program is also
// joined into one file of CommonJS, which run-cached.js runs with a cache. Node.js 22 has module.enableCompileCache().

const MODEL = 'models/adder-base'

/**
 * Replaces the joined command line `file` by one with a code cache. Its processes should have `flags`, options of
 * Node.js: with others, V8 rejects the cache and compiles.
 */
export async function cacheProgram (file, options, flags) {
  const path = resolve(file).replace(/\.js$/, '')
  await build({
    ...options,
    format: 'cjs',
    outExtension: { '.js': '.cjs' },
    banner: { js: '(function (require, module, exports, importModule) {' },
    footer: { js: '})' },
    // A file of ASCII alone is read in half of the time. In strings esbuild escapes other characters, not in patterns,
    // so those with the flag s, which are all that have some, become strings. Comments have some too.
    supported: { 'regexp-dot-all-flag': false },
    legalComments: 'none'
  })
  // Node.js 20 does not recognize scripts from a cache, and refuses their `import`.
  const text = readFileSync(`${path}.cjs`, 'utf8')
  writeFileSync(`${path}.cjs`, text.replaceAll(/\bimport\(/g, 'importModule('))
  const runner = JSON.stringify(new URL('./run-cached.js', import.meta.url).href)
  writeFileSync(
    file,
    `import { runCached } from ${runner}\nawait runCached(${JSON.stringify(path)}, name => import(name)).ended\n`
  )
  await makeCache(file, path, flags)
}

/** Runs a server that answers what tests send most, and writes the cache at its end. */
async function makeCache (file, path, flags) {
  const server = spawn(process.execPath, [...flags, file, 'serve', MODEL, '--port', '0', '--log-level', 'info'], {
    stdio: ['ignore', 'pipe', 'inherit'],
    timeout: 60_000,
    env: { ...process.env, MAKE_CODE_CACHE: path, REFIT_SKIP_SERVER_WARMUP: 'true' }
  })
  const ended = once(server, 'close')
  for await (const line of createInterface(server.stdout)) {
    const url = / is ready on ([^"]+)/.exec(line)?.[1]
    if (url === undefined) continue
    try {
      await use(url)
    } finally {
      server.kill()
    }
  }
  const [code, signal] = await ended
  if (code !== 0) throw new Error(`the server that makes the code cache ended with ${signal ?? code}`)
}

async function use (url) {
  const request = async (path, body) => {
    const reply = await fetch(
      url + path,
      body === undefined ? {} : {
        method: 'POST',
        headers: { 'content-type': 'application/json' },
        body: JSON.stringify(body)
      }
    )
    const text = await reply.text()
    if (!reply.ok) throw new Error(`${path}: ${reply.status} ${text}`)
  }
  const messages = [{ role: 'user', content: '1+1=' }]
  await request('/ready')
  await request('/generate', { text: '1+1=', sampling_params: { max_new_tokens: 4 }, return_logprob: true })
  await request('/v1/chat/completions', { model: MODEL, messages, max_tokens: 4, stream: true })
  await request('/update_weights_from_disk', { model_path: MODEL })
  await request('/weights_checker', { action: 'checksum' })
}
