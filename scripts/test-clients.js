import { spawn, spawnSync } from 'node:child_process'
import { once } from 'node:events'
import { cpSync, mkdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs'
import { createInterface } from 'node:readline'
import { dirname, join } from 'node:path'
import { fileURLToPath } from 'node:url'
import openapiTS, { astToString } from 'openapi-typescript'
import ts from 'typescript'
import { pythonClient } from '../test/clients/python-client.js'

// npm run test:clients: type-checks clients that are generated from openapi/openapi.json, and drives a server with
// them: generation, an update from disk, uploads as a form and as bytes, and a refusal. TypeScript by
// openapi-typescript and openapi-fetch; Python by test/clients/python-client.js, with the Python of $REFIT_PYTHON (3.11
// or newer) and its mypy.

process.chdir(join(dirname(fileURLToPath(import.meta.url)), '..'))
const OUT = join('build', 'clients')
const python = process.env.REFIT_PYTHON ?? join('build', 'venv', 'bin', 'python')
const weights = join('models', 'adder')
const document = JSON.parse(readFileSync(join('openapi', 'openapi.json'), 'utf8'))
let failed = 0

rmSync(OUT, { recursive: true, force: true })
for (const language of ['typescript', 'python']) mkdirSync(join(OUT, language), { recursive: true })
writeFileSync(join(OUT, 'typescript', 'api.d.ts'), await typescriptClient())
cpSync(join('test', 'clients', 'client.js'), join(OUT, 'typescript', 'client.js'))
writeFileSync(join(OUT, 'python', 'api.py'), pythonClient(document))
cpSync(join('test', 'clients', 'client.py'), join(OUT, 'python', 'client.py'))
const shards = splitInTwo(join(weights, 'model.safetensors'))

check('the TypeScript client type-checks', process.execPath, [
  join('node_modules', 'typescript', 'bin', 'tsc'),
  '--noEmit',
  '--ignoreConfig',
  '--strict',
  '--allowJs',
  '--checkJs',
  '--skipLibCheck',
  '--target',
  'es2023',
  '--module',
  'nodenext',
  '--types',
  'node',
  '--allowImportingTsExtensions',
  join(OUT, 'typescript', 'client.js')
])
check('the Python client type-checks', python, [
  '-m',
  'mypy',
  '--strict',
  '--no-warn-return-any',
  '--python-version',
  '3.11',
  join(OUT, 'python', 'api.py'),
  join(OUT, 'python', 'client.py')
], { MYPYPATH: join(OUT, 'python') })
await serve(url =>
  check('the TypeScript client drives a server', process.execPath, [
    join(OUT, 'typescript', 'client.js'),
    url,
    weights,
    ...shards
  ])
)
await serve(url =>
  check('the Python client drives a server', python, [join(OUT, 'python', 'client.py'), url, weights, ...shards])
)
console.log(`${4 - failed} passed, ${failed} failed`)
if (failed > 0) process.exitCode = 1

/** The TypeScript client. Bytes are Blobs, which openapi-typescript leaves to its users. */
async function typescriptClient () {
  const blob = ts.factory.createTypeReferenceNode(ts.factory.createIdentifier('Blob'))
  return astToString(
    await openapiTS(document, { transform: schema => schema.format === 'binary' ? blob : undefined, silent: true })
  )
}

function check (name, command, args, env = {}) {
  const { status } = spawnSync(command, args, { stdio: 'inherit', env: { ...process.env, ...env } })
  console.log(`${status === 0 ? 'ok' : 'NOT OK'}: ${name}`)
  if (status !== 0) failed++
}

/** Starts a server with the untrained model. */
async function serve (use) {
  const server = spawn(process.execPath, [
    join('bin', 'refit.js'),
    'serve',
    join('models', 'adder-base'),
    '--model-root',
    'models',
    '--port',
    '0',
    '--threads',
    '1'
  ], { stdio: ['ignore', 'pipe', 'inherit'] })
  try {
    for await (const line of createInterface({ input: server.stdout })) {
      const url = /http:\/\/127\.0\.0\.1:\d+/.exec(line)?.[0]
      if (url === undefined) continue
      server.stdout.resume()
      use(url)
      return
    }
    throw new Error('the server ended before it listened')
  } finally {
    server.kill('SIGTERM')
    if (server.exitCode === null) await once(server, 'exit')
  }
}

/** Splits the tensors of a safetensors file into two files. */
function splitInTwo (path) {
  const file = readFileSync(path)
  const size = Number(file.readBigUInt64LE(0))
  const { __metadata__: _, ...header } = JSON.parse(file.toString('utf8', 8, 8 + size))
  const all = Object.entries(header)
  return [all.slice(0, 5), all.slice(5)].map((entries, index) => {
    const own = {}
    let at = 0
    const data = entries.map(([name, { dtype, shape, data_offsets: [begin, end] }]) => {
      own[name] = { dtype, shape, data_offsets: [at, at += end - begin] }
      return file.subarray(8 + size + begin, 8 + size + end)
    })
    const text = Buffer.from(JSON.stringify(own))
    const length = Buffer.alloc(8)
    length.writeBigUInt64LE(BigInt(text.length))
    const shard = join(OUT, `shard-${index}.safetensors`)
    writeFileSync(shard, Buffer.concat([length, text, ...data]))
    return shard
  })
}
