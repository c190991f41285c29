import { spawnSync } from 'node:child_process'
import { writeFileSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import { packageRoot } from '../../src/root.ts'

// A module by itself: this test may be joined with the modules that it imports.
const JAIL = join(packageRoot, 'build/test/src/sources/disk/path-jail.js')

t.test('a file that is one too many for the process is refused for that, not for its path', async t => {
  const folder = t.testdir({ 'model.safetensors': 'x' })
  const script = join(folder, 'open.mjs')
  writeFileSync(
    script,
    `import { openSync } from 'node:fs'
    import { PathJail } from ${JSON.stringify(JAIL)}
    const jail = await PathJail.of([${JSON.stringify(folder)}])
    const path = ${JSON.stringify(join(folder, 'model.safetensors'))}
    await (await jail.open(path)).close()
    try { for (;;) openSync('/dev/null') } catch {}
    await jail.open(path).catch(({ code, message }) => console.log(JSON.stringify({ code, message })))`
  )
  const { stdout } = spawnSync('sh', ['-c', 'ulimit -n 100; exec "$0" "$1"', process.execPath, script], {
    encoding: 'utf8'
  })
  t.match(JSON.parse(stdout), {
    code: 'NO_MEMORY',
    message: /as many files and connections open as it may \(ulimit -n\)/
  })
})
