import t from 'tap'
import { checkSpec, isSameSpec } from '../../src/process-groups/group-spec.ts'
import type { GroupFields } from '../../src/process-groups/group-spec.ts'

const FIELDS: GroupFields = {
  name: 'g',
  backend: 'nccl',
  address: '10.0.0.7',
  port: 29_500,
  rankOffset: 1,
  worldSize: 5
}
const engine = { ranks: 2, device: 'cuda' } as const

t.test('two requests are for one group only if they agree in every field', async t => {
  const one = checkSpec(FIELDS, engine)
  t.ok(isSameSpec(one, checkSpec({ ...FIELDS, backend: 'NCCL', root: 0, form: 'custom', barrier: false }, engine)))
  t.ok(
    isSameSpec(
      checkSpec({ ...FIELDS, address: '[fd00::7]' }, engine),
      checkSpec({ ...FIELDS, address: 'fd00::7' }, engine)
    )
  )
  const changes: Array<Partial<GroupFields>> = [
    { name: 'h' },
    { backend: 'gloo' },
    { form: 'stateless' as never },
    { address: '10.0.0.8' },
    { port: 29_501 },
    { rankOffset: 2 },
    { worldSize: 6 },
    { root: 4 },
    { hosts: true, rankOffset: 0, root: 4 },
    { barrier: true }
  ]
  for (const change of changes) {
    t.notOk(
      isSameSpec(one, checkSpec({ ...FIELDS, ...change }, engine)),
      JSON.stringify(change)
    )
  }
})

t.test('ranks of this engine must fit into the world, and none of them may send', async t => {
  const refused = (fields: Partial<GroupFields>, param: string, message: RegExp): void => {
    t.throws(() => checkSpec({ ...FIELDS, ...fields }, engine), { code: 'INVALID_REQUEST', param, message })
  }
  for (const rankOffset of [1, 2, 3]) t.equal(checkSpec({ ...FIELDS, rankOffset }, engine).rankOffset, rankOffset)
  refused({ rankOffset: 4 }, 'world_size', /with rank_offset 4 that is ranks 4 to 5, but world_size is 5/)
  refused({ rankOffset: 0 }, 'rank_offset', /rank 0 is the trainer's/)
  for (const root of [1, 2]) refused({ root }, 'world_size', /one of this engine's own of the 5 ranks/)
  for (const root of [0, 3, 4]) t.equal(checkSpec({ ...FIELDS, root }, engine).root, root)
  refused({ root: 5 }, 'world_size', /rank 5 sends, which is none of the 5 ranks/)
  refused({ hosts: true }, 'rank_offset', /expected 0, got 1/)
  for (const name of ['', 'a b', 'ä', 'x'.repeat(201)]) refused({ name }, 'group_name', /printable ASCII/)
  t.throws(() => checkSpec(FIELDS, { ranks: 1, device: 'cpu' }), { code: 'GROUP_REFUSED' })
  t.throws(() => checkSpec({ ...FIELDS, backend: 'mpi' }, engine), { code: 'UNSUPPORTED' })
})
