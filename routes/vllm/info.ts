import { Type } from 'typebox'
import { compareReports, vllmChecksums } from '../../src/dialects/vllm/checksums.ts'
import { RefitError } from '../../src/errors.ts'
import type { Routes } from '../../src/http/context.ts'
import { nullable, refusals, WeightsRefusal } from '../../src/http/schemas.ts'

const Checksums = Type.Record(Type.String(), Type.String())
const CheckerBody = Type.Object({
  action: Type.Union([Type.Literal('checksum'), Type.Literal('reset'), Type.Literal('compare')], {
    description: 'checksum of every part; reset: noise everywhere, torn until written; compare with a baseline.'
  }),
  baseline: nullable(Checksums, 'What an earlier checksum answered.'),
  checksums: nullable(Type.Array(Checksums), 'Answers of other engines, to be compared, too.')
}, { title: 'VllmCheckerRequest' })

const Checked = Type.Object({
  checksums: Type.Optional(Checksums),
  status: Type.Optional(Type.Literal('reset')),
  match: Type.Optional(Type.Boolean()),
  mismatches: Type.Optional(Type.Array(Type.String())),
  ranks: Type.Optional(Type.Array(Type.String()))
}, { description: 'By action.' })

const WorldQuery = Type.Object({
  include_dp: Type.Optional(Type.Boolean({ description: 'Without effect: there is one replica.' }))
})

/** What trainers ask of a vLLM about itself and its weights. */
const vllmInfo: Routes = async (app, { context }) => {
  const { engine } = context
  const normal = { auth: 'normal', errors: 'weights' } as const

  // SkyRL sends a JSON body along with this GET; it is not read.
  app.get('/get_world_size', {
    config: normal,
    schema: {
      operationId: 'vllmWorldSize',
      summary: 'How many ranks join a process group (vLLM)',
      tags: ['info'],
      querystring: WorldQuery,
      response: {
        200: Type.Object({ world_size: Type.Integer() }, { description: 'Of this engine alone.' }),
        ...refusals(WeightsRefusal)
      }
    }
  }, async () => ({ world_size: engine.info.ranks }))

  app.get('/weight_info', {
    config: normal,
    schema: {
      operationId: 'vllmWeightInfo',
      summary: 'The weight version (vLLM)',
      tags: ['info'],
      response: {
        200: Type.Object({ weight_version: Type.String() }, { description: 'The label in use.' }),
        ...refusals(WeightsRefusal)
      }
    }
  }, async () => ({ weight_version: engine.weightVersion }))

  app.get('/version', {
    config: { auth: 'normal' },
    schema: {
      operationId: 'version',
      summary: 'The version of refit',
      tags: ['info'],
      response: { 200: Type.Object({ version: Type.String() }, { description: 'Of the program.' }), ...refusals() }
    }
  }, async () => ({ version: context.version }))

  app.get('/liveness', {
    config: { auth: 'public' },
    schema: {
      operationId: 'liveness',
      summary: 'Liveness (prime-rl)',
      description: '503 once the engine can do nothing any more.',
      tags: ['health'],
      response: { 200: Type.Object({ status: Type.String() }, { description: 'It works.' }), ...refusals() }
    }
  }, async () => {
    if (engine.closed) throw new RefitError('ENGINE_CLOSED', 'the engine is shut down or has failed')
    return { status: 'ok' }
  })

  app.post('/weight_checker', {
    config: { auth: 'admin', errors: 'weights' },
    schema: {
      operationId: 'vllmWeightChecker',
      summary: 'Checksums of the weights (vLLM)',
      description: 'Keys are `dp0:pp0:pcp0:tp<rank>:<tensor>`. Nothing is kept here: the caller holds the baseline. ' +
        '409 while weights are asleep.',
      tags: ['weights'],
      body: CheckerBody,
      response: { 200: Checked, ...refusals(WeightsRefusal) }
    }
  }, async request => {
    const { action, baseline, checksums } = request.body
    if (action === 'compare' && baseline == null) {
      throw new RefitError('INVALID_REQUEST', 'baseline: action "compare" needs what an earlier "checksum" answered', {
        param: 'baseline'
      })
    }
    if (action === 'reset') {
      await engine.scrambleWeights()
      return { status: 'reset' as const }
    }
    const now = await vllmChecksums(engine)
    return action === 'checksum' ? { checksums: now } : compareReports([baseline!, now, ...checksums ?? []])
  })
}

export default vllmInfo
