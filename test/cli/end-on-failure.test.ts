import t from 'tap'
import { endOnFailure } from '../../src/cli/end-on-failure.ts'
import { RefitError } from '../../src/errors.ts'

t.test('a lost device logs one fatal line, and the process exits with 70 after time for replies', async t => {
  const lines: unknown[] = []
  const code = await new Promise<number>(resolve => {
    endOnFailure(
      new RefitError('DEVICE_LOST', 'rank 1, GPU 3: attention failed; requests in the step: a, b'),
      {
        fatal: (...line: unknown[]) => {
          lines.push(line)
        }
      } as never,
      resolve
    )
    t.equal(lines.length, 1)
  })
  t.equal(code, 70)
  t.same(lines, [[
    { code: 'DEVICE_LOST' },
    'device lost: rank 1, GPU 3: attention failed; requests in the step: a, b. Ending with exit code 70'
  ]])
})

t.test('any other failure becomes an uncaught exception, which shuts the server down', async t => {
  const thrown = new Promise<unknown>(resolve => {
    const listeners = process.listeners('uncaughtException')
    process.removeAllListeners('uncaughtException')
    process.once('uncaughtException', error => {
      for (const listener of listeners) process.on('uncaughtException', listener)
      resolve(error)
    })
  })
  const failure = new RefitError('ENGINE_CLOSED', 'the scheduler ended with code 7')
  endOnFailure(failure, { fatal: () => t.fail('logged twice') } as never, () => t.fail('ended'))
  t.equal(await thrown, failure)
})
