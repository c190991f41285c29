import { Type } from 'typebox'
import type { Static } from 'typebox'
import { DTYPES } from '../../native/dtypes.ts'
import type { DType } from '../../native/dtypes.ts'
import type { Placement, ShardAnnouncement, ShardLayout } from '../../shards/announcement.ts'
import type { KnownPlan } from '../../shards/shard-plans.ts'
import type { ShardUpdate } from '../../updates/shard-update.ts'
import { nullable } from '../schemas.ts'
import { KeptName } from './tensor-body.ts'
import { toUpdateFields, updateFields } from './update-fields.ts'

const strict = { additionalProperties: false } as const
const size = Type.Integer({ minimum: 0, maximum: Number.MAX_SAFE_INTEGER })
const MOST_RANKS = 1 << 16
const rank = Type.Integer({ minimum: 0, maximum: MOST_RANKS - 1 })
const Shape = Type.Array(Type.Integer({ minimum: 0, maximum: 2 ** 31 - 1 }), { minItems: 1, maxItems: 8 })

const PlacementBody = Type.Union([
  Type.Literal('replicate'),
  Type.Object({
    shard: Type.Integer({ minimum: 0, maximum: 7, description: 'The dimension that is cut, as torch.chunk cuts.' }),
    split: Type.Optional(
      Type.Integer({
        minimum: 1,
        maximum: MOST_RANKS,
        description: "split_factor of torch's _StridedShard: cut into so many pieces first, each rank has its part " +
          "of each. Megatron's gate and up in one parameter are one of 2."
      })
    )
  }, strict)
], { description: 'What one dimension of the mesh does. A rank of a "partial" placement holds no copy: not accepted.' })

const LayoutBody = Type.Union([
  Type.Object({
    mesh: Type.Object({
      shape: Type.Array(Type.Integer({ minimum: 1 }), { minItems: 1, maxItems: 8 }),
      ranks: Type.Array(rank, { minItems: 1, description: 'Row-major. Ranks that hold nothing are left out.' })
    }, strict),
    placements: Type.Array(PlacementBody, { description: 'One for each dimension of the mesh, applied in order.' })
  }, strict),
  Type.Object({
    boxes: Type.Array(Type.Object({ rank, offset: Type.Array(size), shape: Type.Array(size) }, strict), {
      description: "Each rank's part of the tensor, as torch.distributed.checkpoint lists chunks."
    })
  }, strict),
  Type.Object({
    flat: Type.Array(Type.Object({ rank, from: size, to: size }, strict), {
      description: "Each rank's range of the elements of the flattened tensor (FSDP1); `to` is the end, exclusive."
    })
  }, strict)
], { title: 'ShardLayout' })

export const ShardPlanBody = Type.Object({
  format: Type.Literal('refit.shards/1'),
  world: Type.Integer({ minimum: 1, maximum: MOST_RANKS, description: 'Number of ranks of the trainer.' }),
  layouts: Type.Array(LayoutBody),
  tensors: Type.Array(
    Type.Object({
      name: Type.String({
        minLength: 1,
        description: 'The name in checkpoints, or any unique one if `into` names the tensors of the model.'
      }),
      shape: Shape,
      dtype: Type.String({ description: '"bfloat16", or as torch prints it, "torch.bfloat16".' }),
      layout: Type.Integer({ minimum: 0, description: 'Index in `layouts`.' }),
      into: Type.Optional(
        Type.Array(Type.Object({ name: Type.String(), rows: Type.Integer({ minimum: 1 }) }, strict), {
          minItems: 1,
          description: 'For fused rows: `rows` rows belong to the first of these tensors, then to the second, and so ' +
            'on, again and again. Qkv by query group: [q: group x head, k: head, v: head]; gate and up: [gate: ' +
            'all of its rows, up: all of its rows].'
        })
      ),
      padded: Type.Optional(
        Type.Boolean({ description: "Rows beyond those of the model's tensor pad the vocabulary, and are not sent." })
      )
    }, strict),
    { description: 'The parameters of the trainer, each with its whole shape over all ranks.' }
  ),
  chunk_bytes: Type.Optional(
    Type.Integer({
      minimum: 1 << 12,
      maximum: 2 ** 32,
      description: 'The most bytes that all ranks together send in one chunk (default 256 MiB).'
    })
  ),
  allow_missing: Type.Optional(
    Type.Boolean({ description: 'Tensors of the model may be absent (default false).' })
  )
}, { ...strict, title: 'ShardPlanRequest' })

const CHUNK_BYTES = 256 << 20

/** Throws a text for a dtype that weights cannot have. */
export function toAnnouncement (body: Static<typeof ShardPlanBody>): ShardAnnouncement | string {
  const tensors: Array<ShardAnnouncement['tensors'][number]> = []
  for (const { name, shape, dtype: text, layout, into, padded } of body.tensors) {
    const dtype = text.replace(/^torch\./, '')
    if (!(dtype in DTYPES)) return `tensors: "${name}" has dtype ${JSON.stringify(text)}, which no weight has`
    tensors.push({
      name,
      shape,
      dtype: dtype as DType,
      layout,
      ...into === undefined ? {} : { into },
      ...padded === true ? { isPadded: true } : {}
    })
  }
  return {
    world: body.world,
    layouts: body.layouts.map(toLayout),
    tensors,
    chunkBytes: body.chunk_bytes ?? CHUNK_BYTES,
    allowMissing: body.allow_missing ?? false
  }
}

function toLayout (layout: Static<typeof LayoutBody>): ShardLayout {
  if ('boxes' in layout) return { kind: 'boxes', boxes: layout.boxes }
  if ('flat' in layout) return { kind: 'flat', ranges: layout.flat }
  const { mesh: { shape, ranks }, placements } = layout
  return {
    kind: 'mesh',
    shape,
    ranks,
    placements: placements.map((placement): Placement =>
      placement === 'replicate'
        ? { kind: 'replicate' }
        : { kind: 'shard', dim: placement.shard, split: placement.split ?? 1 }
    )
  }
}

export const PlanReply = Type.Object({
  success: Type.Literal(true),
  id: Type.String({ description: 'The same for the same announcement.' }),
  digest: Type.String({ description: "SHA-256 of the announcement and of the engine's layout." }),
  world: Type.Integer(),
  ranks: Type.Integer({ description: 'Tensor-parallel ranks of the engine.' }),
  tensors: Type.Integer({ description: 'Tensors of the model that an update writes.' }),
  pieces: Type.Integer({ description: 'Copies of one update.' }),
  classes: Type.Integer({ description: 'Kinds of tensors that are cut alike.' }),
  chunks: Type.Integer(),
  bytes: Type.Object({
    total: Type.Integer(),
    out: Type.Array(Type.Integer(), { description: 'By rank of the trainer.' }),
    in: Type.Array(Type.Integer(), { description: 'By rank of the engine.' })
  }),
  missing: Type.Array(Type.String(), { description: 'Tensors of the model that are not announced, at most 100.' }),
  missing_count: Type.Integer(),
  ignored: Type.Array(Type.String(), { description: 'Announced tensors that the model does not use, at most 100.' }),
  compile_ms: Type.Number()
}, { title: 'ShardPlan', description: 'Every byte of the announced tensors has exactly one sender for each rank.' })

const column = Type.Array(Type.Integer())

export const Sends = Type.Object({
  blocks: Type.Object({ chunk: column, rank: column, offset: column, bytes: column }, {
    description: 'Columns of messages: the chunk, the rank of the engine, the place in the part of the chunk, ' +
      'the bytes.'
  }),
  messages: Type.Object({ chunk: column, rank: column, offset: column, bytes: column }, {
    description: 'The same for NCCL, which sends large blocks in several messages: those of a pair of ranks in this ' +
      'order, all of a chunk in one group.'
  }),
  pieces: Type.Object(
    { chunk: column, tensor: column, at: column, pitch: column, rows: column, cols: column, offset: column },
    {
      description: 'Columns of copies that fill the blocks: the parameter (by its place in the announcement), its ' +
        'first element in the shard, the elements from row to row there, rows and columns, and the place in the part.'
    }
  )
}, { title: 'ShardSends', description: 'Columns of equal length, in the order of the chunks.' })

const SHOWN = 100

export function toPlanReply (plan: KnownPlan) {
  const { id, digest, world, ranks, targets, pieces, classes, chunks, bytes, missing, ignored, ms } = plan
  return {
    success: true as const,
    id,
    digest,
    world,
    ranks,
    tensors: targets.length,
    pieces: pieces.length,
    classes,
    chunks: chunks.length,
    bytes: { total: bytes.out.reduce((sum, bytes) => sum + bytes, 0), ...bytes },
    missing: missing.slice(0, SHOWN),
    missing_count: missing.length,
    ignored: ignored.slice(0, SHOWN),
    compile_ms: ms
  }
}

export const ShardUpdateBody = Type.Object({
  plan: Type.String({ description: 'Id of the plan.' }),
  digest: Type.Optional(Type.String({ description: 'Its digest: 409 PLAN_STALE if it differs.' })),
  handles: Type.Optional(
    Type.Array(Type.String(), {
      description: 'Base64 of pickled handles, one text for each rank of the trainer: a list of (name, shard) with ' +
        'the names of the announcement, as for /update_weights_from_tensor.'
    })
  ),
  keep: nullable(KeptName, 'Keep the shards that this request opens, to write them again with `kept`.'),
  kept: nullable(
    KeptName,
    'Instead of `handles`: write the shards that are kept under this name again, with the values that they have now.'
  ),
  group_name: Type.Optional(
    Type.String({
      description: 'Instead of both: the ranks send their blocks as messages in this process group, in which they ' +
        "come first; the tag is the chunk's number."
    })
  ),
  upload: Type.Optional(
    Type.Boolean({ description: 'Instead of all: the ranks upload their blocks (POST /shard_plans/{id}/parts).' })
  ),
  ...updateFields
}, { ...strict, title: 'ShardUpdateRequest' })

export function toShardUpdate (body: Static<typeof ShardUpdateBody>): ShardUpdate {
  const { plan, digest, handles, keep, kept, group_name: groupName, upload } = body
  return { ...toUpdateFields(body), plan, digest, handles, keep, kept, groupName, upload }
}
