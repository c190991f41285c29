import t from 'tap'
import { writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { createEngine } from '../../src/app/create-engine.ts'
import { probeGpus } from '../../src/engine/memory/probe-gpus.ts'
import { packageRoot } from '../../src/root.ts'

const MODEL = join(packageRoot, 'test/goldens/qwen3')

t.test("the child's result arrives complete", async (t) => {
  const script = join(t.testdir(), 'child.mjs')
  writeFileSync(script, 'process.stdout.write(JSON.stringify({ gpus: [{ name: "x".repeat(200000) }] }))')
  t.equal((await probeGpus({ script })).gpus[0]!.name.length, 200000)
})

for (
  const [how, source, message] of [
    [
      'crashes',
      'process.stderr.write("loading\\nlibcuda.so.1: it broke\\n", () => process.kill(process.pid, "SIGSEGV"))',
      /GPUs was ended by SIGSEGV \(libcuda\.so\.1: it broke\): the CUDA driver, or a library .* is broken; see whether/
    ],
    ['fails', 'throw new Error("no addon")', /looked at the GPUs failed with code 1 \(/],
    ['hangs', 'setInterval(() => {}, 1000)', /looked at the GPUs did not end within 0\.7 s/]
  ] as const
) {
  t.test(`a child that ${how} gives a message in the parent`, async (t) => {
    const script = join(t.testdir(), 'child.mjs')
    writeFileSync(script, source)
    await t.rejects(probeGpus({ script, limitMs: how === 'hangs' ? 700 : 60_000 }), { code: 'CONFIG', message })
  })
}

t.test('the real child and an engine without usable GPUs report the same message', async (t) => {
  process.env.REFIT_CUDA_LIBRARY = join(t.testdir(), 'librefit_cuda.so')
  const found = await probeGpus()
  t.match(found.error, /librefit_cuda\.so does not exist/)
  t.same(found.gpus, [])
  await t.rejects(createEngine(MODEL, { device: 'cuda' }), {
    code: 'CONFIG',
    message: /^--device cuda: .*librefit_cuda\.so does not exist.*build-native/
  })
  await t.rejects(createEngine(MODEL, { device: 'cuda', dtype: 'float32' }), {
    code: 'CONFIG',
    message: /^--dtype float32: GPUs compute in bfloat16 or float16/
  })
  await t.rejects(createEngine(MODEL, { device: 'cuda', tp: 3 }), {
    code: 'CONFIG',
    message: /^--tp: 3 ranks do not divide/
  })
  await t.rejects(createEngine(MODEL, { device: 'cuda:1', baseGpuId: 2 }), {
    code: 'CONFIG',
    message: /name different GPUs/
  })
})
