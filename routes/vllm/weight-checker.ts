import { Type } from 'typebox'
import { compareReports, vllmChecksums } from '../../src/dialects/vllm/checksums.ts'
import { RefitError } from '../../src/errors.ts'
import { nullable, refusals, WeightsRefusal } from '../../src/http/schemas.ts'
import { weightsRoute } from '../../src/http/updates/update-route.ts'
import type { UpdateRoutes } from '../../src/http/updates/update-route.ts'

const Checksums = Type.Record(Type.String(), Type.String())
const CheckerBody = Type.Object({
  action: Type.Union([Type.Literal('checksum'), Type.Literal('reset'), Type.Literal('compare')], {
    description: 'checksum: of every part; reset: overwrite all weights with noise, torn until written; compare: ' +
      'with a baseline.'
  }),
  baseline: nullable(Checksums, 'The reply of an earlier checksum action.'),
  checksums: nullable(Type.Array(Checksums), 'Replies of other engines to compare, too.')
}, { title: 'VllmCheckerRequest' })

const Checked = Type.Object({
  checksums: Type.Optional(Checksums),
  status: Type.Optional(Type.Literal('reset')),
  match: Type.Optional(Type.Boolean()),
  mismatches: Type.Optional(Type.Array(Type.String())),
  ranks: Type.Optional(Type.Array(Type.String()))
}, { description: 'Fields depend on the action.' })

/** vLLM's checksums of the weights, and the comparison of them. */
const weightChecker: UpdateRoutes = async (app, { context: { engine } }) => {
  weightsRoute(app, '/weight_checker', {
    config: { changesWeights: true },
    schema: {
      operationId: 'vllmWeightChecker',
      summary: 'Checksums of the weights (vLLM)',
      description:
        'Keys are `dp0:pp0:pcp0:tp<rank>:<tensor>`. Nothing is stored here: the caller keeps the baseline. ' +
        '409 while weights are asleep.',
      tags: ['weights'],
      body: CheckerBody,
      response: { 200: Checked, ...refusals(WeightsRefusal) }
    }
  }, async request => {
    const { action, baseline, checksums } = request.body
    if (action === 'compare' && baseline == null) {
      throw new RefitError('INVALID_REQUEST', 'baseline: action "compare" needs the reply of an earlier "checksum"', {
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

export default weightChecker
