import t from 'tap'
import { readdirSync, readFileSync } from 'node:fs'
import { join } from 'node:path'
import { ESLint } from 'eslint'
import { packageRoot } from '../src/root.ts'

const CUDA = ['cuda', 'probe', 'bench_gpu', 'test']
const RULE = '@typescript-eslint/no-restricted-imports'
const eslint = new ESLint({ cwd: packageRoot })

const files = (folder: string, pattern: RegExp): string[] =>
  readdirSync(join(packageRoot, folder), { recursive: true, encoding: 'utf8' })
    .filter(name => pattern.test(name))
    .map(name => join(folder, name))

async function refusals (file: string, specifier: string, keyword = 'import'): Promise<string[]> {
  const [result] = await eslint.lintText(`${keyword} { X } from '${specifier}'\nexport const y: unknown = X\n`, {
    filePath: join(packageRoot, file)
  })
  return result!.messages.filter(({ ruleId }) => ruleId === RULE).map(({ message }) => message)
}

t.test('the lint rules refuse an import against the direction of the house', async t => {
  for (
    const [file, specifier] of [
      ['routes/x.ts', '../src/wire/pickle.ts'],
      ['routes/x.ts', '../src/native.ts'],
      ['src/weights/x.ts', '../engine/scheduler.ts'],
      ['src/weights/x.ts', '../../routes/generate.ts'],
      ['src/weights/x.ts', '../wire/safetensors.ts'],
      ['src/sources/x.ts', '../weights/plan.ts'],
      ['src/sources/x.ts', '../engine/scheduler.ts'],
      ['src/sources/x.ts', '../pulls/weight-pulls.ts'],
      ['src/pulls/x.ts', '../weights/plan.ts'],
      ['src/engine/x.ts', '../sources/disk.ts'],
      ['src/engine/deeper/x.ts', '../../wire/safetensors.ts'],
      ['src/engine/x.ts', '../config.ts'],
      ['src/wire/x.ts', '../native.ts'],
      ['src/wire/x.ts', '../model/rope.ts'],
      ['src/wire/x.ts', 'node:fs'],
      ['src/wire/x.ts', 'node:fs/promises'],
      ['src/wire/x.ts', 'net'],
      ['src/store/x.ts', '../native.ts'],
      ['src/store/x.ts', '../weights/plan.ts'],
      ['src/model/x.ts', '../native.ts'],
      ['src/model/x.ts', '../weights/plan.ts'],
      ['src/text/x.ts', '../engine/scheduler.ts'],
      ['src/config/x.ts', '../engine/scheduler.ts'],
      ['src/engine/x.ts', '../server.ts'],
      ['src/sources/x.ts', '../plugin.ts'],
      ['src/main.ts', '../routes/generate.ts'],
      ['src/http/metrics.ts', '../routes/generate.ts']
    ] as const
  ) t.equal((await refusals(file, specifier)).length, 1, `${file} imports ${specifier}`)
})

t.test('the lint rules let through what the house allows', async t => {
  for (
    const [file, specifier, keyword] of [
      ['routes/x.ts', '../src/weights/update.ts'],
      ['routes/x.ts', '../src/errors.ts'],
      ['src/weights/x.ts', '../sources/disk.ts'],
      ['src/weights/x.ts', '../native.ts'],
      ['src/sources/x.ts', '../wire/safetensors.ts'],
      ['src/sources/x.ts', '../weights/source.ts', 'import type'],
      ['src/pulls/x.ts', '../sources/path-jail.ts'],
      ['src/engine/x.ts', '../model/rope.ts'],
      ['src/store/x.ts', '../wire/store-request.ts'],
      ['src/wire/x.ts', './safetensors.ts'],
      ['src/model/x.ts', '../native.ts', 'import type'],
      ['src/wire/x.ts', '../errors.ts'],
      ['src/app/server.ts', '../routes/generate.ts'],
      ['src/app/plugin.ts', '../routes/generate.ts']
    ] as const
  ) t.same(await refusals(file, specifier, keyword), [], `${file} ${keyword ?? 'import'}s ${specifier}`)
})

t.test('only native/binding includes napi.h, and it knows no CUDA', async t => {
  const sources = files('native', /\.(cc|h|cu|cuh)$/)
  t.ok(sources.length > 10)
  for (const file of sources) {
    const text = readFileSync(join(packageRoot, file), 'utf8')
    if (!file.startsWith(join('native', 'binding'))) t.notMatch(text, /#include\s*[<"](napi|node_api)/, file)
    if (!CUDA.some(folder => file.startsWith(join('native', folder)))) t.notMatch(text, /#include\s*[<"]cuda/, file)
  }
})

t.test('a file of the program has at most 400 lines', async t => {
  const sources = [...files('src', /\.ts$/), ...files('routes', /\.ts$/), ...files('native', /^(?!test\/).*\.(cc|h)$/)]
  const long = sources.filter(file => readFileSync(join(packageRoot, file), 'utf8').split('\n').length > 401)
  t.same(long, [])
})
