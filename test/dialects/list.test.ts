import { readdirSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import { ALL_DIALECTS, chooseDialects, chooseRoutes, DIALECT_NAMES } from '../../src/app/dialects.ts'
import { callTable } from '../../src/gateway/call-table.ts'
import { packageRoot } from '../../src/root.ts'

const folders = (path: string): string[] =>
  readdirSync(join(packageRoot, path), { withFileTypes: true })
    .filter(entry => entry.isDirectory())
    .map(({ name }) => name)

t.test('every folder of a dialect and of its routes is in the list', async t => {
  const names = ALL_DIALECTS.map(({ name }) => name).sort()
  t.same(folders('src/dialects').sort(), names)
  t.same(folders('routes').filter(name => name !== 'gateway' && name !== 'ui').sort(), names)
})

t.test('a server registers each route plugin of the chosen dialects once', async t => {
  const all = chooseRoutes(chooseDialects([]))
  t.same(all, new Set(ALL_DIALECTS.flatMap(({ routes }) => routes)))
  t.ok(chooseRoutes(chooseDialects(['trl'])).size < all.size)
  t.same([...chooseDialects([])], DIALECT_NAMES)
})

t.test('a path that two dialects list is an error', async t => {
  const calls = { '/a': { to: 'all' } } as const
  t.throws(() => callTable([{ name: 'x', calls }, { name: 'y', calls }]), /dialect y: another dialect lists \/a too/)
})
