import { execFileSync } from 'node:child_process'
import { existsSync, readFileSync } from 'node:fs'
import { dirname, join, relative } from 'node:path'
import { ESLint } from 'eslint'
import t from 'tap'
import { OPTIONS } from '../src/config/schema.ts'
import { packageRoot } from '../src/root.ts'

// Rules that the linter cannot check: sizes of folders and files, circular imports between folders, and words.

const text = (file: string): string => readFileSync(join(packageRoot, file), 'utf8')
/** Includes files that are not added yet. git still lists files that are deleted only in the work tree. */
const tracked = execFileSync('git', ['ls-files', '--cached', '--others', '--exclude-standard', '--deduplicate'], {
  cwd: packageRoot,
  encoding: 'utf8',
  maxBuffer: 16 << 20
})
  .split('\n')
  .filter(name => name !== '' && existsSync(join(packageRoot, name)))
const matching = (pattern: RegExp): string[] => tracked.filter(file => pattern.test(file))

interface Lint {
  LAYERS: Record<string, string[] | '*'>
  FILES: Record<string, string[]>
}
const { LAYERS, FILES } = await import(join(packageRoot, 'eslint.config.js')) as Lint
const eslint = new ESLint({ cwd: packageRoot })

/** The messages of `rule` about a file of `folder` with these imports. */
async function refusals (rule: string, folder: string, specifiers: readonly string[]): Promise<string[]> {
  const lines = specifiers.map((specifier, i) => `import { X as x${i} } from '${specifier}'\n`)
  const uses = `export const y: unknown[] = [${specifiers.map((_, i) => `x${i}`).join(', ')}]\n`
  const [result] = await eslint.lintText(lines.join('') + uses, { filePath: join(packageRoot, folder, 'x.ts') })
  return result!.messages.filter(({ ruleId }) => ruleId === rule).map(({ message }) => message)
}

/** How a file of `folder` imports `file`. */
function specifier (folder: string, file: string): string {
  const path = relative(folder, file)
  return path.startsWith('.') ? path : `./${path}`
}

/** Any file of a folder, because the rule resolves the imports that it checks. */
function aFileOf (folder: string): string {
  const file = tracked.find(name => name.startsWith(`${folder}/`) && name.endsWith('.ts'))
  if (file === undefined) throw new Error(`${folder} has no TypeScript file`)
  return file
}

t.test('the lint rules refuse every import that the layers do not list, and no other', async t => {
  const rule = 'import/no-restricted-paths'
  for (const [folder, allowed] of Object.entries(LAYERS)) {
    const others = Object.keys(LAYERS).filter(other => other !== folder)
    const wanted = others
      .filter(other => allowed !== '*' && !allowed.includes(other))
      .map(other => `${folder} does not import from ${other}.`)
    const files = Object.keys(FILES)
    wanted.push(
      ...files.filter(file => !FILES[file]!.includes(folder)).map(file => `${folder} does not import ${file}.`)
    )
    const got = await refusals(rule, folder, [...others.map(aFileOf), ...files].map(file => specifier(folder, file)))
    t.strictSame(
      got.filter(message => !wanted.some(end => message.endsWith(end))),
      [],
      `${folder} may import what the layers list`
    )
    const missing = wanted.filter(end => !got.some(message => message.endsWith(end)))
    t.strictSame(missing, [], `${folder} may import nothing else`)
  }
})

t.test('imports that the layers of the design do not allow are refused', t => {
  for (
    const [folder, other] of [
      ['routes', 'src/wire'],
      ['routes', 'src/engine'],
      ['src/weights', 'src/engine'],
      ['src/weights', 'routes'],
      ['src/sources', 'src/weights'],
      ['src/sources', 'src/engine'],
      ['src/engine', 'src/sources'],
      ['src/engine', 'src/wire'],
      ['src/wire', 'src/model'],
      ['src/model', 'src/weights'],
      ['src/text', 'src/engine'],
      ['src/native', 'src/http'],
      ['src/http', 'src/app'],
      ['src/updates', 'src/http'],
      ['src/gateway', 'src/engine']
    ] as const
  ) t.notOk(LAYERS[folder]?.includes(other), `${folder} imports ${other}`)
  t.end()
})

t.test('every folder of src has its layer', t => {
  const files = matching(/^(src\/[^/]+|routes)\/.+\.ts$/)
  const folders = new Set(files.map(file => /^(src\/[^/]+|routes)\//.exec(file)![1]!))
  t.strictSame([...folders].filter(folder => !(folder in LAYERS)), [])
  t.end()
})

t.test('src/wire opens no file and no socket', async t => {
  const modules = ['node:fs', 'node:fs/promises', 'net', 'node:http']
  t.equal((await refusals('no-restricted-imports', 'src/wire', modules)).length, modules.length)
  t.equal((await refusals('no-restricted-imports', 'src/wire', ['node:buffer'])).length, 0)
})

t.test('the folders of src have no circular imports', t => {
  const imports = new Map<string, Set<string>>()
  const folderOf = (file: string): string | undefined => /^(src\/[^/]+|routes)\//.exec(file)?.[1]
  for (const file of matching(/^(src|routes)\/.+\.ts$/)) {
    const folder = folderOf(file)
    if (folder === undefined) continue
    for (const [, name] of text(file).matchAll(/(?:from|import\()\s*'(\.[^']+)'/g)) {
      const other = folderOf(join(dirname(file), name!))
      if (other === undefined || other === folder) continue
      imports.set(folder, (imports.get(folder) ?? new Set()).add(other))
    }
  }
  const circles: string[] = []
  const done = new Set<string>()
  const follow = (folder: string, path: string[]): void => {
    if (path.includes(folder)) circles.push([...path.slice(path.indexOf(folder)), folder].join(' -> '))
    else if (!done.has(folder)) {
      for (const other of imports.get(folder) ?? []) follow(other, [...path, folder])
      done.add(folder)
    }
  }
  for (const folder of imports.keys()) follow(folder, [])
  t.ok(imports.size > 10)
  t.strictSame(circles, [])
  t.end()
})

t.test('folders beside each other do not import each other both ways', t => {
  const arrows = new Set<string>()
  for (const file of matching(/^src\/.+\.ts$/)) {
    const folder = dirname(file)
    for (const [, name] of text(file).matchAll(/(?:from|import\()\s*'(\.[^']+)'/g)) {
      const other = dirname(join(folder, name!))
      if (dirname(other) === dirname(folder) && other !== folder) arrows.add(`${folder} -> ${other}`)
    }
  }
  t.ok(arrows.size > 100)
  t.strictSame([...arrows].filter(arrow => arrows.has(arrow.split(' -> ').reverse().join(' -> '))), [])
  t.end()
})

t.test('only native/binding includes napi.h, and only the CUDA folders include CUDA', t => {
  const sources = matching(/^native\/.*\.(cc|h|cu|cuh)$/)
  t.ok(sources.length > 10)
  const napi = sources.filter(file =>
    !file.startsWith('native/binding/') && /#include\s*[<"](napi|node_api)/.test(text(file))
  )
  t.strictSame(napi, [])
  const cuda = sources.filter(file =>
    !/^native\/(cuda|probe|bench_gpu|test)\//.test(file) && /#include\s*[<"]cuda/.test(text(file))
  )
  t.strictSame(cuda, [])
  t.end()
})

t.test('native errors name no flag and no route, because the program that has them adds them', t => {
  const flags = Object.keys(OPTIONS).map(name => name.replace(/[A-Z]/g, letter => `-${letter.toLowerCase()}`))
  const routes = Object
    .keys((JSON.parse(text('openapi/openapi.json')) as { paths: object }).paths)
    .filter(path => /^\/[a-z_]{8,}/.test(path))
    .map(path => path.replaceAll(/[{}.]/g, String.raw`\$&`))
  const names = new RegExp(`--(${flags.join('|')})(?![a-z-])|(${routes.join('|')})(?![a-z_/])`)
  const found = matching(/^native\/(binding|codec|core|cpu|cuda|transport)\/.*\.(cc|h|cu|cuh)$/).flatMap(file =>
    [...text(file).replaceAll(/^#include .*$/gm, '').matchAll(/"(?:[^"\\\n]|\\.)*"/g)]
      .filter(([literal]) => names.test(literal))
      .map(([literal]) => `${file}: ${literal}`)
  )
  t.strictSame(found, [])
  t.end()
})

t.test('a folder holds at most 40 files', t => {
  const counts = new Map<string, number>()
  for (const file of tracked) counts.set(dirname(file), (counts.get(dirname(file)) ?? 0) + 1)
  t.strictSame([...counts].filter(([, count]) => count > 40), [])
  t.end()
})

t.test('a file of code has at most 400 lines', t => {
  const code = matching(/\.(ts|js|cc|h|cu|cuh|py|cmake)$|CMakeLists\.txt$|^\.ci\//)
  t.ok(code.length > 500)
  const long = code.map(file => `${file}: ${text(file).trimEnd().split('\n').length}`).filter(line =>
    Number(line.split(': ')[1]) > 400
  )
  t.strictSame(long, [])
  t.end()
})

t.test('a line of C++, CUDA, Python, CMake, shell or prose has at most 120 columns', t => {
  const files = matching(/\.(cc|h|cu|cuh|py|cmake|sh|md)$|CMakeLists\.txt$|^\.ci\/|Dockerfile/)
  // Reports of measurements stay as a program wrote them.
  const long = files.filter(file => !file.startsWith('bench/results/')).flatMap(file =>
    text(file).split('\n').flatMap((line, index) =>
      // A table cannot be wrapped, and a URL cannot be cut.
      [...line].length <= 120 || (file.endsWith('.md') && /^\s*\||https?:\/\/\S{60}/.test(line))
        ? []
        : [`${file}:${index + 1}`]
    )
  )
  t.strictSame(long, [])
  t.end()
})

t.test('no comment line begins with a word that hides its subject', t => {
  const files = matching(/\.(ts|js|cc|h|cu|cuh|py|cmake|sh)$|CMakeLists\.txt$|^\.ci\/|Dockerfile/)
  const comment = /^\s*(\/\/|\/\*\*?|\*|#|""")\s*(Of|What|Who|Whose|Whoever|Where|Those)\b/
  const found = files.flatMap(file =>
    text(file).split('\n').flatMap((line, index) => comment.test(line) ? [`${file}:${index + 1}: ${line.trim()}`] : [])
  )
  t.strictSame(found, [])
  t.end()
})
