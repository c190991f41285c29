import t from 'tap'
import { fromNativeGroup } from '../../src/process-groups/native-group-errors.ts'

const failed = (message: string, code?: string): Error =>
  Object.assign(new Error(message), code === undefined ? {} : { code })

t.test('errors of a native process group get a code of the API and advice with routes and options', async t => {
  t.same(fromNativeGroup(failed('rank 1 and rank 0 share GPU-0', 'GROUP_SHARED_GPU')), {
    code: 'GROUP_REFUSED',
    message: 'rank 1 and rank 0 share GPU-0; NCCL takes one rank for each GPU: use /update_weights_from_tensor where ' +
      'trainer and engine share a GPU, or backend "gloo"'
  })
  t.match(fromNativeGroup(failed('version mismatch', 'GROUP_NCCL_VERSION')), {
    code: 'GROUP_REFUSED',
    message: /^version mismatch; .*--nccl-path or REFIT_NCCL$/
  })
  t.match(fromNativeGroup(failed('GPU 0 is full', 'NO_MEMORY')), {
    code: 'NO_MEMORY',
    message: /^GPU 0 is full; lower --bucket-bytes/
  })
})

t.test('errors without advice keep their message, and errors of other kinds are left alone', async t => {
  t.same(fromNativeGroup(failed('too late', 'GROUP_TIMEOUT')), { code: 'GROUP_TIMEOUT', message: 'too late' })
  t.equal(fromNativeGroup(failed('a bug')), null)
  t.equal(fromNativeGroup('a text'), null)
})
