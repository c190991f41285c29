import { spawnSync } from 'node:child_process'
import { join } from 'node:path'
import t from 'tap'
import { compile, LIBRARY, SANITIZED } from './helpers/compile.ts'

// NCCL itself needs GPUs. This tests how the library is opened, and that every wait in it can be ended, with a library
// that has NCCL's interface and scripted answers. native/test/gpu/nccl_test.cc has the rest.

const folder = t.testdir()
const standIn = (name: string, ...flags: string[]): string =>
  compile(join(folder, name), ['nccl_stand_in.cc'], [...LIBRARY, ...flags])
const program = compile(join(folder, 'nccl_life'), [
  'nccl_life.cc',
  'nccl.cc',
  'nccl_api.cc',
  'dynamic.cc'
], SANITIZED)

function run (library: string, env: NodeJS.ProcessEnv = {}): { status: number | null, said: string } {
  const { NCCL_NVLS_ENABLE: _, ...rest } = process.env
  const { status, stdout, stderr } = spawnSync(program, [library], {
    encoding: 'utf8',
    env: { ...rest, ...env },
    timeout: 120_000
  })
  return { status, said: stdout + stderr }
}

t.test('a communicator can be joined, awaited, aborted and ended', async t => {
  for (const [version, name] of [[22809, '2.28.9'], [21703, '2.17.3'], [21405, '2.14.5']] as const) {
    const library = standIn(`nccl-${version}.so`, `-DVERSION=${version}`)
    const { status, said } = run(library)
    t.equal(status, 0, said)
    t.match(said, `NCCL ${name}, ${library}, NCCL_NVLS_ENABLE=0\n`)
    t.match(said, / 0 failures/)
  }
})

t.test("the user's setting of NCCL multicast is kept", async t => {
  const { status, said } = run(standIn('nccl-nvls.so', '-DVERSION=22809'), { NCCL_NVLS_ENABLE: '1' })
  t.equal(status, 0, said)
  t.match(said, 'NCCL_NVLS_ENABLE=1\n')
})

t.test('a library that is missing, too old, too new or lacks a function is refused with the reason', async t => {
  const cases: Array<[string, string | RegExp]> = [
    [
      '/nowhere/libnccl.so.2',
      /NCCL was not found: install it or torch, or name its file in \w+; tried\n\/nowhere\/libnccl\.so\.2: cannot open/
    ],
    [
      standIn('old.so', '-DVERSION=21212'),
      /NCCL 2\.12\.12 \(.*old\.so\) is not used: versions from 2\.14 on, below 3, are known/
    ],
    [standIn('four-digits.so', '-DVERSION=2708'), /NCCL 2\.7\.8 \(.*\) is not used/],
    [standIn('new.so', '-DVERSION=30001'), /NCCL 3\.0\.1 \(.*\) is not used/],
    [
      standIn('short.so', '-DVERSION=22809', '-DWITHOUT_RECV'),
      /NCCL 2\.28\.9 \(.*short\.so\) has no function ncclRecv/
    ],
    [
      compile(join(folder, 'other.so'), ['echo_device.cc'], LIBRARY),
      /other\.so is not NCCL: it reports no version/
    ]
  ]
  for (const [library, message] of cases) {
    const { status, said } = run(library)
    t.equal(status, 3, said)
    t.match(said, message)
  }
})
