import t from 'tap'
import { symlinkSync } from 'node:fs'
import { join } from 'node:path'
import { resolveModel } from '../../src/config/resolve-model.ts'

const COMMIT = '0123456789abcdef0123456789abcdef01234567'

t.test('a folder is used as it is, and weights may come from its parent folder', async t => {
  const dir = t.testdir({ base: { 'config.json': '{}' }, empty: {}, 'file.safetensors': '' })
  t.same(resolveModel(join(dir, 'base'), 'main', {}), { path: join(dir, 'base'), root: dir })
  symlinkSync('base', join(dir, 'link'))
  t.same(resolveModel(join(dir, 'link'), 'main', {}), { path: join(dir, 'base'), root: dir })
  t.throws(() => resolveModel(join(dir, 'empty'), 'main', {}), { code: 'CONFIG', message: /has no config.json/ })
  t.throws(() => resolveModel(join(dir, 'file.safetensors'), 'main', {}), {
    code: 'CONFIG',
    message: /is a file; give the folder/
  })
  t.throws(() => resolveModel(join(dir, 'none'), 'main', {}), { code: 'CONFIG', message: /none does not exist/ })
})

t.test('a name is looked up in the Hugging Face cache at the place that its variables set', async t => {
  const model = () => ({
    refs: { main: COMMIT, pr: { 1: 'fedcba' } },
    snapshots: { [COMMIT]: { 'config.json': '{}' }, fedcba: { 'config.json': '{}' }, half: {} }
  })
  const dir = t.testdir({
    hub: { 'models--org--name': model() },
    '.cache': { huggingface: { hub: { 'models--org--name': model() } } }
  })
  const root = join(dir, 'hub', 'models--org--name')
  const expected = { path: join(root, 'snapshots', COMMIT), root }
  t.same(resolveModel('org/name', 'main', { HF_HUB_CACHE: join(dir, 'hub'), HF_HOME: '/nowhere' }), expected)
  t.same(resolveModel('org/name', 'main', { HF_HOME: dir }), expected)
  t.same(resolveModel('org/name', COMMIT, { HF_HOME: '~', HOME: dir }), expected)
  t.equal(
    resolveModel('org/name', 'main', { HOME: dir }).root,
    join(dir, '.cache', 'huggingface', 'hub', 'models--org--name')
  )
  t.equal(
    resolveModel('org/name', 'main', { XDG_CACHE_HOME: join(dir, '.cache'), HOME: '/nowhere' }).root,
    join(dir, '.cache', 'huggingface', 'hub', 'models--org--name')
  )
  t.equal(resolveModel('org/name', 'pr/1', { HF_HOME: dir }).path, join(root, 'snapshots', 'fedcba'))
  t.throws(() => resolveModel('org/name', 'half', { HF_HOME: dir }), {
    message: /its download did not finish; repeat it with: hf download org\/name --revision half$/
  })
  for (const revision of ['v2', 'pr', '../snapshots', '..', '/etc/passwd', '']) {
    t.throws(
      () => resolveModel('org/name', revision, { HF_HOME: dir }),
      { code: 'CONFIG', message: /no revision/ },
      revision
    )
  }
})

t.test('a missing model is refused with the command that downloads it', async t => {
  const environment = { HF_HOME: t.testdir() }
  t.throws(() => resolveModel('Qwen/Qwen3-0.6B', 'main', environment), {
    code: 'CONFIG',
    message: /get it with: hf download Qwen\/Qwen3-0\.6B$/
  })
  for (const path of ['./a/b', '../b', 'a', 'a/b/c', '/no/where', 'a/', '/b']) {
    t.throws(() => resolveModel(path, 'main', environment), { code: 'CONFIG', message: /does not exist/ }, path)
  }
})
