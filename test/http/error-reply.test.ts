import Fastify from 'fastify'
import t from 'tap'
import { RefitError } from '../../src/errors.ts'
import { errorHandler } from '../../src/http/error-reply.ts'

async function logOf (error: unknown): Promise<Record<string, any>> {
  const lines: Record<string, any>[] = []
  const app = Fastify({
    logger: {
      level: 'info',
      stream: {
        write: (line: string) => {
          lines.push(JSON.parse(line))
        }
      }
    }
  })
  app.setErrorHandler(errorHandler)
  app.get('/', async () => {
    throw error
  })
  await app.inject('/')
  return lines.find(line => line['msg'] !== 'incoming request')!
}

const INFO = 30
const WARN = 40
const ERROR = 50

t.test("refusals that report the server's state are warnings without a stack", async t => {
  for (const code of ['QUEUE_FULL', 'ENGINE_TORN', 'ENGINE_CLOSED'] as const) {
    const line = await logOf(new RefitError(code, 'not now'))
    t.match(line, { level: WARN, code, msg: 'not now' })
    t.notOk('err' in line, code)
  }
})

t.test('defects are logged with their stack, and bad requests are not logged as warnings', async t => {
  t.match(await logOf(new TypeError('x is undefined')), {
    level: ERROR,
    err: { message: 'x is undefined', stack: /error-reply/ }
  })
  t.match(await logOf(new RefitError('WEIGHTS_TORN', 'half written')), { level: ERROR, err: { stack: /error-reply/ } })
  t.match(await logOf(new RefitError('ENGINE_CLOSED', 'the scheduler failed', { cause: new Error('out of memory') })), {
    level: ERROR,
    err: { stack: /out of memory/ }
  })
  t.match(await logOf(new RefitError('INVALID_REQUEST', 'n is 0')), { level: INFO, code: 'INVALID_REQUEST' })
})
