import type { Test } from 'tap'
import type { ServerOptions } from '../../src/app/server.ts'
import { GroupTrainer } from './group-trainer.ts'
import type { SentTensor, TrainerOptions } from './group-trainer.ts'
import { layout, uploadServer } from './uploads.ts'
import type { Reply, UploadEngine, UploadServer } from './uploads.ts'

export interface GroupServer extends UploadServer {
  post: (path: string, body?: unknown) => Promise<Reply>
  /** The tensors of a bundled model, as in its file. */
  tensors: (model: 'adder' | 'adder-base') => SentTensor[]
  trainer: (options?: Partial<TrainerOptions>) => Promise<GroupTrainer>
  /** A trainer that has joined a group with this engine. */
  joined: (options?: Partial<TrainerOptions>) => Promise<GroupTrainer>
  /** Posts an update while the trainer sends. */
  update: (trainer: GroupTrainer, tensors: readonly SentTensor[], fields?: Record<string, unknown>) => Promise<Reply>
  groups: () => Promise<any[]>
  metric: (name: string) => Promise<number>
}

const DTYPES: Record<string, string> = { BF16: 'bfloat16', F16: 'float16', F32: 'float32' }

/** A server over the adder's base with `tp` ranks, and trainers that make groups of one engine with it. */
export async function groupServer (
  t: Test,
  { tp = 1, ...options }: Partial<ServerOptions> & UploadEngine = {}
): Promise<GroupServer> {
  const server = await uploadServer(t, { tp, groupTimeoutMs: 60_000, ...options })
  const post = async (path: string, body?: unknown): Promise<Reply> => {
    const reply = await fetch(server.url + path, {
      method: 'POST',
      headers: { 'content-type': 'application/json' },
      body: body === undefined ? null : JSON.stringify(body)
    })
    return { status: reply.status, body: await reply.json() }
  }
  const trainer: GroupServer['trainer'] = async options => {
    const made = await GroupTrainer.start({ size: 1 + tp, ...options })
    t.teardown(async () => {
      await made.end().catch(() => {})
    })
    return made
  }
  return {
    ...server,
    post,
    trainer,
    tensors: model => {
      const file = server.file(model)
      const { tensors } = layout(file)
      return tensors.map(({ name, dtype, shape, begin, end }) => ({
        name,
        dtype: DTYPES[dtype] ?? dtype,
        shape,
        data: file.subarray(begin, end)
      }))
    },
    joined: async options => {
      const made = await trainer(options)
      const [reply] = await Promise.all([post('/init_weights_update_group', made.init()), made.join()])
      if (reply.status !== 200) throw new Error(`init answered ${JSON.stringify(reply.body)}`)
      return made
    },
    update: async (trainer, tensors, fields) => {
      const sent = trainer.send(tensors, fields?.load_format === 'flattened_bucket').catch((error: Error) => error)
      const reply = await post('/update_weights_from_distributed', trainer.update(tensors, fields))
      const error = await sent
      if (reply.status === 200 && error instanceof Error) {
        throw new Error(`the trainer could not send (${error.message}); the reply was ${JSON.stringify(reply)}`)
      }
      return reply
    },
    groups: async () => ((await (await fetch(`${server.url}/server_info`)).json()) as any).weight_groups,
    metric: async name =>
      Number(
        new RegExp(`^refit:${name}\\{.*\\} (\\S+)$`, 'm').exec(await (await fetch(`${server.url}/metrics`)).text())?.[1]
      )
  }
}
