import { Type } from 'typebox'
import type { Static } from 'typebox'
import type { FastifyReply } from 'fastify'
import type { FleetInfo } from '../../peer/fleet-info.ts'
import type { SendGroups } from '../../peer/send-groups.ts'
import { RefitError, withPrefix } from '../../errors.ts'
import { measureUpdate } from '../../updates/measure-update.ts'
import type { UpdatesContext } from '../context.ts'
import { invalid } from '../refuse.ts'
import { nullable, onRunningField, swapField } from '../schemas.ts'

const GROUP_NAME = 'weight_send_group'
const MOST_PIECE_BYTES = 1 << 30
const DEFAULT_PIECE_BYTES = 64 << 20

const masterAddress = Type.String({ minLength: 1, description: "The address of the group's stores." })
const ports = Type.String({
  pattern: '^\\s*\\d{1,5}\\s*(,\\s*\\d{1,5}\\s*)*$',
  description:
    'Ports of the stores, separated by commas: one for each tensor-parallel rank; with "layout": "checkpoint", one.'
})
const groupName = Type.Optional(
  Type.String({ minLength: 1, maxLength: 200, pattern: '^[\\x21-\\x7e]+$', description: `Default "${GROUP_NAME}".` })
)

export const InitSendBody = Type.Object({
  master_address: masterAddress,
  ports,
  group_rank: Type.Integer({ description: 'The rank of this engine: 0, because it sends.' }),
  world_size: Type.Integer({
    minimum: 2,
    maximum: 65535,
    description: "Number of ranks of each group: this engine's and the receivers'."
  }),
  group_name: groupName,
  backend: Type.Optional(Type.Union([Type.Literal('nccl'), Type.Literal('gloo')], { description: 'Default "nccl".' })),
  layout: Type.Optional(Type.Union([Type.Literal('parameters'), Type.Literal('checkpoint')], {
    description:
      'refit\'s own. "parameters" (default): the parameters of each rank, in the engine\'s order and form, over a ' +
      'group of its own. "checkpoint": whole checkpoint tensors over one group.'
  })),
  receiver_hosts: Type.Optional(
    Type.Boolean({
      description:
        "refit's own. The receiver runs the stores, and this engine connects to them (see --allow-master). " +
        "Default false: this engine runs them on an address of its own, as torch's rank 0."
    })
  ),
  barrier: Type.Optional(
    Type.Boolean({
      description: "refit's own. All ranks wait at a barrier before the first byte. After it a receiver knows that " +
        'nothing is refused any more. Default false.'
    })
  ),
  piece_bytes: Type.Optional(
    Type.Integer({
      minimum: 1,
      maximum: MOST_PIECE_BYTES,
      description: "refit's own. Most bytes of one broadcast of checkpoint tensors."
    })
  ),
  timeout: Type.Optional(
    Type.Number({
      minimum: 0.1,
      maximum: 86400,
      description: "refit's own. Seconds that each step may take (default 300)."
    })
  )
}, { title: 'InitWeightsSendGroupRequest' })

export const SendBody = Type.Object({ master_address: masterAddress, ports, group_name: groupName }, {
  title: 'SendWeightsRequest'
})

export const PeerLoadBody = Type.Object({
  url: Type.String({
    minLength: 1,
    maxLength: 2048,
    description: 'The engine that has the weights: http://host:port or https://host:port. ' +
      'This engine must be able to reach it there. See --allow-master.'
  }),
  api_key: nullable(Type.String(), 'Its admin key, or its API key if it has no other key.'),
  timeout: Type.Optional(
    Type.Number({
      minimum: 0.1,
      maximum: 86400,
      description: 'Seconds to wait until the other engine is ready, and for each step of the transfer (default 300).'
    })
  ),
  abort_all_requests: Type.Optional(Type.Boolean({ description: 'End running requests instead of waiting for them.' })),
  swap: swapField,
  on_running: onRunningField
}, { title: 'PeerUpdateRequest' })

const DEFAULT_TIMEOUT_S = 300

/** The messages, and the texts before a failure's reason, are SGLang's. */
export async function initSendGroup (
  context: UpdatesContext,
  body: Static<typeof InitSendBody>,
  reply: FastifyReply
): Promise<string> {
  const groups = requireGroups(context)
  try {
    const list = portsOf(body.ports)
    await groups.init({
      masterAddress: body.master_address,
      ports: list,
      rank: body.group_rank,
      size: body.world_size,
      name: body.group_name ?? GROUP_NAME,
      backend: body.backend ?? 'nccl',
      layout: body.layout ?? 'parameters',
      receiverHosts: body.receiver_hosts ?? false,
      barrier: body.barrier ?? false,
      pieceBytes: body.piece_bytes ?? DEFAULT_PIECE_BYTES,
      timeoutMs: (body.timeout ?? DEFAULT_TIMEOUT_S) * 1000,
      signal: goneSignal(reply)
    })
    return `Succeeded to init group through ${showMaster(body.master_address, list[0]!)} group.`
  } catch (error) {
    throw withPrefix('Failed to init group: ', error)
  }
}

export async function sendToRemote (context: UpdatesContext, body: Static<typeof SendBody>, reply: FastifyReply) {
  const groups = requireGroups(context)
  const name = body.group_name ?? GROUP_NAME
  try {
    const list = portsOf(body.ports)
    const { sent, layout } = await groups.send(name, list, goneSignal(reply))
    return {
      success: true as const,
      message: `Succeeded to send weights through ${showMaster(body.master_address, list[0]!)} ${name}.`,
      weight_version: sent.version,
      layout,
      bytes: sent.bytes,
      ms: sent.ms,
      checksums: sent.checksums
    }
  } catch (error) {
    throw withPrefix('Failed to send weights: ', error)
  }
}

/** Loads the weights of another engine into this one, as at a start with --load-from. */
export async function loadFromOther (context: UpdatesContext, body: Static<typeof PeerLoadBody>, reply: FastifyReply) {
  const { peerLoads } = context
  if (peerLoads === null) throw holdsNone('cannot load others')
  return await measureUpdate(context, {}, async record => {
    const { report, version, route } = await peerLoads
      .load({
        url: body.url,
        key: body.api_key ?? undefined,
        timeoutMs: (body.timeout ?? DEFAULT_TIMEOUT_S) * 1000,
        abort: body.abort_all_requests ?? false,
        swap: body.swap ?? 'auto',
        onRunning: body.on_running ?? 'continue',
        signal: goneSignal(reply)
      })
      .catch(error => {
        throw withPrefix('Failed to update weights: ', error)
      })
    record.wrote(report)
    return {
      message: `Succeeded to update model weights. Weight version updated to ${version}.`,
      version,
      route,
      report
    }
  })
}

export function weightsInfo (context: UpdatesContext): FleetInfo {
  return requireGroups(context).info(context.engine, context.version)
}

function requireGroups ({ sending }: UpdatesContext): SendGroups {
  if (sending !== null) return sending
  throw holdsNone('cannot send them')
}

function holdsNone (what: string): RefitError {
  return new RefitError(
    'UNSUPPORTED',
    `this engine does not hold its weights in this process, and ${what} from here; ` +
      'send the request to the server that holds them'
  )
}

function portsOf (text: string): number[] {
  const list = text.split(',').map(Number)
  const wrong = list.find(port => port < 1 || port > 65_535)
  if (wrong !== undefined) throw invalid('ports', `expected ports from 1 to 65535, got ${wrong}`)
  if (new Set(list).size !== list.length) throw invalid('ports', `each group has a store of its own, got ${text}`)
  return list
}

function showMaster (address: string, port: number): string {
  return address.includes(':') && !address.startsWith('[') ? `[${address}]:${port}` : `${address}:${port}`
}

/** Aborted when the caller closes the connection before the reply. */
function goneSignal ({ raw }: FastifyReply): AbortSignal {
  const control = new AbortController()
  raw.once('close', () => {
    if (!raw.writableFinished) {
      control.abort(new RefitError('GROUP_BROKEN', 'the client has closed the connection'))
    }
  })
  return control.signal
}
