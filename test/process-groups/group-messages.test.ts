import t from 'tap'
import { namePart } from '../../src/process-groups/group-messages.ts'

const name = (message: string): string =>
  (namePart(Object.assign(new Error(message), { code: 'GROUP_BROKEN' }), part => `"tensor ${part}"`) as Error).message

t.test('an error names the broadcast that is awaited, and a later one that is at fault', async t => {
  t.equal(
    name('sends 6 bytes in broadcast 29, expected 8; 0 of 8 bytes of broadcast 28 (part 4 of 25) had come'),
    'sends 6 bytes in broadcast 29 ("tensor 5"), expected 8; ' +
      '0 of 8 bytes of broadcast 28 (part 4 of 25, "tensor 4") had come'
  )
  t.equal(
    name('sends 6 bytes in broadcast 60, expected 8; 0 of 8 bytes of broadcast 28 (part 4 of 25) had come'),
    'sends 6 bytes in broadcast 60, expected 8; 0 of 8 bytes of broadcast 28 (part 4 of 25, "tensor 4") had come'
  )
  t.equal(name('sends 6 bytes in broadcast 29, expected 8'), 'sends 6 bytes in broadcast 29, expected 8')
  t.equal(name('a message without parts'), 'a message without parts')
  t.equal(
    (namePart(Object.assign(new Error('x'), { code: 'GROUP_TIMEOUT' }), () => '') as { code: string }).code,
    'GROUP_TIMEOUT'
  )
})
