import { writeFileSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import { loadWeightLoaders } from '../../src/cli/weight-loaders.ts'

t.test('modules are imported relative to the folder, under the names given', async t => {
  const folder = t.testdir({
    'a.mjs': 'export default () => [["a", 1]]',
    sub: { 'b.mjs': 'export default async function b () { return [] }' }
  })
  const loaders = await loadWeightLoaders([
    'mine=./a.mjs',
    'verl.apply_delta=sub/b.mjs',
    `absolute=${join(folder, 'a.mjs')}`
  ], folder)
  t.same(Object.keys(loaders), ['mine', 'verl.apply_delta', 'absolute'])
  t.equal(loaders.mine, loaders.absolute)
  t.same(await loadWeightLoaders([], folder), {})
})

t.test('a module that cannot be loaded is an error that names the flag', async t => {
  const folder = t.testdir({
    'empty.mjs': '',
    'named.mjs': 'export function load () {}',
    'broken.mjs': 'export default (',
    'throws.mjs': 'throw new Error("not today")'
  })
  writeFileSync(join(folder, 'value.mjs'), 'export default 3')
  for (
    const [options, message] of [
      [['a.mjs'], /expected NAME=FILE, such as mine=\.\/loader\.mjs, got "a\.mjs"/],
      [['=a.mjs'], /expected NAME=FILE/],
      [['a='], /expected NAME=FILE/],
      [['a=named.mjs', 'a=named.mjs'], /a: .*named\.mjs has no function for its default export \(it exports load\)/],
      [['a=empty.mjs'], /it exports nothing/],
      [['a=value.mjs'], /it exports default/],
      [['a=gone.mjs'], /a: .*gone\.mjs cannot be loaded: Cannot find module/],
      [['a=broken.mjs'], /broken\.mjs cannot be loaded/],
      [['a=throws.mjs'], /throws\.mjs cannot be loaded: not today/]
    ] as const
  ) {
    await t.rejects(
      loadWeightLoaders(options, folder),
      { code: 'CONFIG', param: '--weight-loader', message },
      options.join(' ')
    )
  }
  writeFileSync(join(folder, 'good.mjs'), 'export default () => []')
  await t.rejects(loadWeightLoaders(['a=good.mjs', 'a=good.mjs'], folder), { message: /the name "a" is given twice/ })
})
