import { Type } from 'typebox'
import { sparseRefitOf } from '../../src/dialects/nemo-rl/sparse.ts'
import { RefitError } from '../../src/errors.ts'
import { nemoRlError } from '../../src/dialects/nemo-rl/error-form.ts'
import { KEY_HEADER } from '../../src/dialects/nemo-rl/key-header.ts'
import { TENSOR_BODY_LIMIT } from '../../src/http/limits.ts'
import { refusals } from '../../src/http/schemas.ts'
import { updateRoute, weightsRoute } from '../../src/http/updates/update-route.ts'
import type { UpdateRoutes } from '../../src/http/updates/update-route.ts'

const Prepare = Type.Object({
  tensors: Type.Record(
    Type.String(),
    Type.Array(Type.Union([Type.Array(Type.Integer({ minimum: 0 })), Type.String()]), { minItems: 2, maxItems: 2 }),
    { description: 'Name of each tensor that may change -> its shape, and its dtype as torch names it.' }
  )
}, { title: 'NemoRlPrepareRequest' })

const Manifest = Type.Object({
  bucket: Type.String(),
  region: Type.String(),
  key: Type.String(),
  checksum: Type.String({ description: 'BLAKE2b-128 of the object, in hexadecimal.' }),
  verification_candidates: Type.Optional(Type.Integer({ minimum: 0 }))
}, { title: 'NemoRlManifestRequest' })

const ZmqFlush = Type.Object({
  transfer_id: Type.String(),
  expected_payloads: Type.Optional(Type.Integer({ minimum: 0 }))
}, { title: 'NemoRlZmqFlushRequest' })

const Done = Type.Object({ ok: Type.Literal(true), payloads: Type.Optional(Type.Integer()) }, {
  title: 'NemoRlReply',
  description: 'Done.',
  additionalProperties: true
})
const Refused = Type.Object({
  ok: Type.Literal(false),
  error: Type.String(),
  code: Type.String({ description: 'A stable code, such as CONFLICT.' })
}, { title: 'NemoRlRefusal', description: 'Refused; the weights have not changed, unless the message says otherwise.' })

function toPair (
  name: string,
  [shape, dtype]: ReadonlyArray<number[] | string>
): readonly [shape: readonly number[], dtype: string] {
  if (Array.isArray(shape) && typeof dtype === 'string') return [shape, dtype]
  throw new RefitError('INVALID_REQUEST', `tensors.${name}: expected [shape, dtype]`, { param: 'tensors' })
}

async function prepare (
  sparse: ReturnType<typeof sparseRefitOf>,
  pairs: Type.Static<typeof Prepare>['tensors']
): Promise<{ ok: true, tensors: number, overwrite_names: string[], seconds: number }> {
  const began = performance.now()
  const tensors = Object.entries(pairs).map(([name, pair]) => [name, toPair(name, pair)] as const)
  const names = await sparse.prepare(Object.fromEntries(tensors))
  return { ok: true, tensors: tensors.length, overwrite_names: names, seconds: (performance.now() - began) / 1000 }
}

/** NeMo-RL's remote sparse refit: changed elements wait until a flush writes them. */
const nemoRlSparse: UpdateRoutes = async (app, { context }) => {
  const sparse = sparseRefitOf(context)
  const config = { keyHeader: KEY_HEADER, errors: nemoRlError } as const
  const schema = { tags: ['weights'], response: { 200: Done, ...refusals(Refused) } }

  weightsRoute(app, '/nemo-rl/refit/prepare', {
    config,
    bodyLimit: TENSOR_BODY_LIMIT,
    schema: {
      ...schema,
      operationId: 'nemoRlPrepare',
      summary: 'Set the weights that changes are relative to (NeMo-RL)',
      description: "The current weights are the trainer's baseline from now on. `overwrite_names`: " +
        'tensors that need their new values instead of changed bits.',
      body: Prepare
    }
  }, async request => await prepare(sparse, request.body.tensors))

  weightsRoute(app, '/nemo-rl/refit/s3-manifest', {
    config,
    schema: {
      ...schema,
      operationId: 'nemoRlS3Manifest',
      summary: 'Read a payload from S3 (NeMo-RL)',
      description: 'Replies after reading and checking it; the flush writes it.',
      body: Manifest
    }
  }, async request => {
    const began = performance.now()
    const { bucket, region, key, checksum, verification_candidates: candidates = 0 } = request.body
    const { payloads, duplicate } = await sparse.takeFromS3({ bucket, region, key }, {
      key: `s3://${bucket}/${key}`,
      checksum,
      candidates
    })
    return {
      ok: true as const,
      payloads,
      ...duplicate ? { duplicate } : {},
      receiver_s3_download_s: (performance.now() - began) / 1000
    }
  })

  weightsRoute(app, '/nemo-rl/refit/zmq-flush', {
    config,
    schema: {
      ...schema,
      operationId: 'nemoRlZmqFlush',
      summary: 'Wait for the payloads of a transfer over ZeroMQ (NeMo-RL)',
      body: ZmqFlush
    }
  }, async () => {
    throw new RefitError(
      'UNSUPPORTED',
      'payloads are read from S3 (refit_transport "vllm_s3_sparse"), not over ZeroMQ'
    )
  })

  updateRoute(app, context, '/nemo-rl/refit/flush', {
    config,
    schema: {
      ...schema,
      operationId: 'nemoRlFlush',
      summary: 'Write all payloads (NeMo-RL)',
      description: 'All payloads are one update. After a failure payloads are refused until the trainer prepares ' +
        'again.',
      body: Type.Object({})
    }
  }, async () => {
    const { payloads, seconds, candidates, changed } = await sparse.flush()
    return {
      ok: true as const,
      payloads,
      batches: payloads === 0 ? 0 : 1,
      seconds,
      changed,
      verification_candidates: candidates
    }
  })
}

export default nemoRlSparse
