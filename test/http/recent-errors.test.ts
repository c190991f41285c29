import t from 'tap'
import { RecentErrors, withoutSecrets } from '../../src/http/recent-errors.ts'

const error = {
  time: '2026-01-01T00:00:00Z',
  method: 'POST',
  route: '/a',
  status: 500,
  code: 'INTERNAL',
  message: null
}

t.test('equal errors in a row are one entry with a count', t => {
  const errors = new RecentErrors()
  errors.add(error)
  errors.add({ ...error, time: '2026-01-02T00:00:00Z' })
  errors.add({ ...error, code: 'WEIGHTS_TORN' })
  t.strictSame(errors.total, 3)
  t.match(errors.list, [{ code: 'WEIGHTS_TORN', count: 1 }, {
    code: 'INTERNAL',
    count: 2,
    time: '2026-01-02T00:00:00Z'
  }])
  t.end()
})

t.test('the list is bounded, and the oldest leave first', t => {
  const errors = new RecentErrors()
  for (let i = 0; i < 1000; i++) errors.add({ ...error, route: `/${i}` })
  t.equal(errors.list.length, 50)
  t.equal(errors.list[0]!.route, '/999')
  t.equal(errors.list.at(-1)!.route, '/950')
  t.equal(errors.total, 1000)
  t.end()
})

t.test('URLs lose names, passwords and queries', t => {
  t.equal(
    withoutSecrets('s3://key:secret@bucket/a and https://host/b?X-Amz-Signature=1&c=2, not mail@host'),
    's3://***@bucket/a and https://host/b?*** not mail@host'
  )
  t.end()
})
