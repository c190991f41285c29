import { spawn } from 'node:child_process'
import { once } from 'node:events'
import { mkdirSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import type { Test } from 'tap'
import { packageRoot } from '../../src/root.ts'
import { compile } from '../native/helpers/compile.ts'
import { uploadServer } from '../helpers/uploads.ts'
import type { Reply, UploadServer } from '../helpers/uploads.ts'

// A checkpoint that another process rewrites through a shared mapping while updates read it. Stores through a mapping
// move time stamps at most once; an update that was answered with 200 must hold one of the two contents whole.

const UPDATES = 60

async function load (server: UploadServer, folder: string): Promise<Reply> {
  const reply = await fetch(`${server.url}/update_weights_from_disk`, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify({ model_path: folder })
  })
  return { status: reply.status, body: await reply.json() }
}

/** Runs native/test/mapping_writer.cc until `stop` is called. */
async function writer (t: Test, mode: 'held' | 'anew', file: string): Promise<{ stop: () => Promise<void> }> {
  const program = compile(join(t.testdirName, 'mapping_writer'), ['mapping_writer.cc'], [])
  const contents = ['adder', 'adder-base'].map(model => join(packageRoot, 'models', model, 'model.safetensors'))
  const child = spawn(program, [mode, file, ...contents], { stdio: ['pipe', 'pipe', 'inherit'] })
  t.teardown(() => child.kill('SIGKILL'))
  await once(child.stdout, 'data')
  return {
    stop: async () => {
      const exit = once(child, 'exit')
      child.stdin.end()
      t.same(await exit, [0, null], 'the writer wrote to the end')
    }
  }
}

for (const mode of ['held', 'anew'] as const) {
  t.test(`no update mixes the contents of a file that is rewritten through a mapping (${mode})`, async t => {
    const root = t.testdir({})
    const server = await uploadServer(t, { modelRoots: [root] })
    const folder = join(root, 'shared')
    mkdirSync(folder)
    const file = join(folder, 'model.safetensors')
    const whole = new Map<string, string>()
    for (const model of ['adder', 'adder-base'] as const) {
      writeFileSync(file, server.file(model))
      t.match(await load(server, folder), { status: 200 })
      whole.set(JSON.stringify(await server.checksums()), model)
    }
    const { stop } = await writer(t, mode, file)
    const counts = { taken: 0, refused: 0 }
    for (let update = 0; update < UPDATES; update++) {
      const { status, body } = await load(server, folder)
      if (status === 200) {
        counts.taken++
        if (!whole.has(JSON.stringify(await server.checksums()))) {
          t.fail('an update with a mixture was answered with 200')
        }
      } else {
        counts.refused++
        if (!/CHECKPOINT_CHANGED|WEIGHTS_TORN/.test(JSON.stringify(body))) t.fail(JSON.stringify(body).slice(0, 500))
        const { status: answered } = await server.generate()
        if (answered === 200 && !whole.has(JSON.stringify(await server.checksums()))) t.fail('a mixture generates')
      }
    }
    t.comment(counts)
    t.ok(counts.refused > 0, `${counts.refused} of ${UPDATES} updates are refused`)
    if (mode === 'held') t.equal(counts.taken, 0, 'a file that is mapped for writing is refused at once')
    await stop()
    t.match(await load(server, folder), { status: 200 }, 'and can be loaded once the writer has ended')
    t.ok(whole.has(JSON.stringify(await server.checksums())))
  })
}
