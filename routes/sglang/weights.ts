import type { RolloutEngine } from '../../src/contract/rollout-engine.ts'
import { Type } from 'typebox'
import type { UpdatesContext } from '../../src/http/context.ts'
import { updateFromDisk } from '../../src/updates/disk-update.ts'
import { DiskUpdateBody, toDiskUpdate } from '../../src/http/updates/disk-body.ts'
import { labelText } from '../../src/http/updates/update-fields.ts'
import { getBody } from '../../src/http/get-body.ts'
import { nullable, refusals, tornTensors, unused, WeightsRefusal } from '../../src/http/schemas.ts'
import { changesWeightsCheck } from '../../src/dialects/sglang/weights-check.ts'
import { bodyCheck } from '../../src/http/validation.ts'
import { WeightsChecker } from '../../src/updates/weights-checker.ts'
import { Report, toReport } from '../../src/http/updates/write-report.ts'
import { RefitError } from '../../src/errors.ts'
import { updateRoute, weightsRoute } from '../../src/http/updates/update-route.ts'
import type { UpdateApp, UpdateRoutes } from '../../src/http/updates/update-route.ts'

const DiskUpdated = Type.Object({
  success: Type.Literal(true),
  message: Type.String(),
  num_paused_requests: Type.Integer({ description: 'Always 0, as in SGLang.' }),
  torn_count: tornTensors,
  report: Report
}, { title: 'DiskUpdateReply', description: 'All bytes are in place.' })

const VersionBody = Type.Object({
  new_version: Type.String(),
  abort_all_requests: Type.Optional(Type.Boolean({ description: 'End running requests (default true).' }))
})

const VersionUpdated = Type.Object(
  { success: Type.Literal(true), message: Type.String(), new_version: Type.String() },
  { description: 'Done.' }
)

const GetWeightsBody = Type.Object({
  name: Type.String({ minLength: 1, description: 'Name of a tensor in checkpoints.' }),
  truncate_size: Type.Optional(Type.Integer({ minimum: 0, description: 'Most rows (default 100).' }))
})

/** Limit of one reply: JSON of about 80 MB. */
const MAX_VALUES = 1 << 22

const Values = Type.Array(Type.Unknown(), { description: 'Values as float32; a matrix is a list of rows.' })

const CheckerBody = Type.Object({
  action: Type.Optional(
    Type.Union([
      Type.Literal('checksum'),
      Type.Literal('snapshot'),
      Type.Literal('reset_tensors'),
      Type.Literal('compare')
    ], {
      description:
        'checksum (default): returns checksums; snapshot: stores them; compare: compares with the snapshot; ' +
        'reset_tensors: fills all weights with noise and marks them torn.'
    })
  ),
  allow_quant_error: unused(),
  skip_tensor_list: unused(),
  selector: unused()
}, { title: 'WeightsCheckerRequest' })

const Checked = Type.Object({
  success: Type.Literal(true),
  message: Type.String(),
  ranks: Type.Optional(
    Type.Array(Type.Object({ checksums: Type.Record(Type.String(), Type.String()), per_gpu_checksum: Type.String() }))
  ),
  per_engine_checksum: Type.Optional(Type.String()),
  checksums: Type.Optional(
    Type.Record(Type.String(), Type.String(), { description: 'The checksum of every whole checkpoint tensor.' })
  )
}, { title: 'WeightsCheckerReply', description: 'Done.' })

const NO_QUERY = { name: nullable(Type.String()), truncate_size: nullable(Type.Integer({ minimum: 0 })) }

const config = { auth: 'admin', errors: 'weights' } as const
const tags = ['weights']

/** Reads, checks and replaces weights. */
const weights: UpdateRoutes = async (app, { context }) => {
  updateRoutes(app, context)
  getRoutes(app, context.engine)
  checkerRoutes(app, context.engine)
}

function updateRoutes (app: UpdateApp, context: UpdatesContext): void {
  const { engine } = context

  updateRoute(app, context, '/update_weights_from_disk', {
    schema: {
      operationId: 'updateWeightsFromDisk',
      summary: 'Load new weights from a checkpoint on disk',
      description: 'All headers are checked before the first byte is written. ' +
        'A call equal to a running call gets the outcome of that call.',
      tags,
      body: DiskUpdateBody,
      response: { 200: DiskUpdated, ...refusals(WeightsRefusal) }
    }
  }, async request => {
    const { report, torn } = await updateFromDisk(context, toDiskUpdate(request.body))
    const message = `Succeeded to update model weights.${labelText(request.body.weight_version, report)}`
    return { success: true as const, message, num_paused_requests: 0, torn_count: torn, report: toReport(report) }
  })

  weightsRoute(app, '/update_weight_version', {
    schema: {
      operationId: 'updateWeightVersion',
      summary: 'Set the label without changing the weights',
      description: 'Between begin_weight_update and end_weight_update, the label is set at the end.',
      tags,
      body: VersionBody,
      response: { 200: VersionUpdated, ...refusals(WeightsRefusal) }
    }
  }, async request => {
    const { new_version: version, abort_all_requests: abort = true } = request.body
    // While another client's transaction is open, the request is refused, so it must not abort anything before.
    const { current } = engine.transactions
    if (abort && (current === null || current.scope)) engine.abortAll()
    const isMoved = await engine.setWeightVersion(version)
    return {
      success: true as const,
      message: isMoved
        ? `Weight version updated to ${version}`
        : `Weight version will be ${version} when the open update ends`,
      new_version: version
    }
  })
}

function getRoutes (app: UpdateApp, engine: RolloutEngine): void {
  const getSchema = { tags, response: { 200: Values, ...refusals() } }
  const readWeights = async (
    { name, truncate_size: rows = 100 }: Type.Static<typeof GetWeightsBody>
  ): Promise<unknown[]> => {
    const columns = (await engine.readWeight(name, 1)).values.length
    if (rows * columns > MAX_VALUES) {
      const most = Math.floor(MAX_VALUES / columns)
      throw new RefitError(
        'INVALID_REQUEST',
        `truncate_size: ${rows} rows of ${columns} values are more than one reply holds; ` +
          `at most ${most} rows of ${name}`,
        { param: 'truncate_size' }
      )
    }
    const { shape, values } = await engine.readWeight(name, rows)
    return nested(shape, values)
  }
  const checkGetWeights = bodyCheck(GetWeightsBody)
  app.get('/get_weights_by_name', {
    exposeHeadRoute: false,
    config: { auth: 'admin' },
    schema: {
      ...getSchema,
      operationId: 'getWeightsByNameGet',
      summary: 'Values of a tensor (as POST; by query or by a JSON body)',
      querystring: Type.Object(NO_QUERY)
    }
  }, async request => await readWeights(await getBody(request, checkGetWeights)))
  weightsRoute(app, '/get_weights_by_name', {
    config: { errors: 'sglang' },
    schema: { ...getSchema, operationId: 'getWeightsByName', summary: 'Values of a tensor', body: GetWeightsBody }
  }, async request => await readWeights(request.body))
}

function checkerRoutes (app: UpdateApp, engine: RolloutEngine): void {
  const checker = new WeightsChecker(engine)
  const check = async ({ action = 'checksum' }: Type.Static<typeof CheckerBody>): Promise<object> => {
    if (action === 'checksum') return await checker.checksum()
    if (action === 'snapshot') await checker.snapshot()
    if (action === 'compare') await checker.compare()
    if (action === 'reset_tensors') await engine.scrambleWeights()
    return { success: true, message: 'Success.' }
  }
  const checkSchema = { tags, response: { 200: Checked, ...refusals(WeightsRefusal) } }
  const checkChecker = bodyCheck(CheckerBody)
  app.get('/weights_checker', {
    exposeHeadRoute: false,
    config: { ...config, changesWeights: true, ownHeader: changesWeightsCheck },
    schema: {
      ...checkSchema,
      operationId: 'weightsCheckerGet',
      summary: 'Check weights (as POST; by query or by a JSON body)',
      querystring: Type.Object({ action: nullable(Type.String()) })
    }
  }, async request => await check(await getBody(request, checkChecker)))
  weightsRoute(app, '/weights_checker', {
    config: { changesWeights: true },
    schema: { ...checkSchema, operationId: 'weightsChecker', summary: 'Check weights', body: CheckerBody }
  }, async request => await check(request.body))
}

/** Flat values as lists: for a matrix one list per row (leading dimensions are merged), else the values. */
function nested (shape: number[], values: Float32Array): unknown[] {
  if (shape.length < 2) return Array.from(values)
  const columns = shape.at(-1)!
  return Array.from(
    { length: columns === 0 ? 0 : values.length / columns },
    (_, row) => Array.from(values.subarray(row * columns, (row + 1) * columns))
  )
}

export default weights
