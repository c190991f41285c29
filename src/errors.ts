// Every error code of the project, with its HTTP status and its meaning. Codes are public: `error.code` of replies and
// the log contain them, and their meaning never changes.

const CODES = {
  INVALID_REQUEST: [400, 'a field of the request is missing, of the wrong type or out of range'],
  PROMPT_TOO_LONG: [400, 'prompt and requested tokens do not fit the context length'],
  UNSUPPORTED: [400, 'known, but not supported by refit'],
  UNAUTHORIZED: [401, 'the key is missing or wrong'],
  FORBIDDEN: [403, 'the key does not permit this route'],
  FOREIGN_REQUEST: [
    403,
    'a page of another website sent the request, or it names a host that is not this server: see --allowed-host'
  ],
  NOT_FOUND: [404, 'no such route, model or name'],
  CONFLICT: [409, 'another update, or the state of the engine, prevents it'],
  TRANSACTION_OPEN: [409, 'a weight transaction of another owner is open'],
  TRANSACTION_INCOMPLETE: [409, 'a weight transaction cannot be committed yet: it stays open'],
  TRANSACTION_ENDED: [409, 'the weight transaction was committed or aborted, or its deadline has passed'],
  WEIGHT_VERSION: [409, 'the engine does not have the weights that the request is bound to'],
  BODY_TOO_LARGE: [413, 'the body exceeds the limit of its route'],
  BODY_BROKEN: [400, 'the body broke off, differs from its stated length, or is no well-formed form'],
  BODY_STALLED: [408, 'no byte of an upload arrived for longer than --upload-timeout'],
  SPOOL_FAILED: [
    507,
    'the folder where uploads are spooled has no room for the body, or cannot be written to; nothing has changed'
  ],
  QUEUE_FULL: [503, 'as many requests wait as --max-queued-requests allows'],
  PAGES_FULL: [503, 'as many pages follow the event stream as it serves'],
  ENGINE_TORN: [503, 'weights are torn: an update failed midway and has not been repeated'],
  ENGINE_ASLEEP: [503, 'memory of the engine is released and has not been resumed'],
  GENERATION_PAUSED: [503, 'generation is paused by /pause with abort or wait, which refuses new requests'],
  ENGINE_CLOSED: [503, 'the engine is shutting down or has failed'],
  DEVICE_LOST: [503, 'a device is lost or stuck; the process must end'],
  NO_MEMORY: [503, 'there is not enough memory; nothing has changed, or released memory stays released'],
  WORKERS_CLOSED: [403, 'a gateway that has keys of engines and none of its own takes no engine from clients'],
  MASTER_REFUSED: [403, 'the address of a store is one that refit does not connect to: see --allow-master'],
  STORE_UNREACHABLE: [502, 'the store of a rendezvous cannot be reached, or the connection to it broke'],
  STORE_PROTOCOL: [502, "the peer at a store's address is no TCPStore, or holds invalid values"],
  ZMQ_UNREACHABLE: [502, 'the ZeroMQ socket of a parameter server cannot be reached, or the connection to it broke'],
  ZMQ_PROTOCOL: [502, 'the peer at a ZeroMQ socket is no parameter server, or sends invalid messages'],
  NO_ENGINE: [503, 'no engine behind the gateway is ready'],
  ENGINE_FAILED: [502, 'an engine behind the gateway, or a remote one, could not be reached or replied with an error'],
  LOOP: [508, 'a gateway got a request that it had sent: one of its engines leads back to it'],
  VERSIONS_DISAGREE: [409, 'engines behind the gateway hold different weights'],
  DEADLINE: [504, 'a deadline passed'],
  MODEL_CONFIG: [400, 'config.json does not describe a model that refit can run'],
  CHECKPOINT_PATH: [400, 'the path is not a readable checkpoint inside the allowed roots'],
  CHECKPOINT_FORMAT: [400, 'a safetensors file or index breaks its format'],
  CHECKPOINT_CHANGED: [400, 'a file changed while it was read'],
  PICKLE_MALFORMED: [400, 'a payload is not a well-formed pickle (or not base64 of one)'],
  PICKLE_REFUSED: [400, 'a pickle contains an opcode or a name outside of the closed set that refit reads as data'],
  PICKLE_LIMIT: [400, 'a pickle is larger, deeper or holds more objects than refit reads'],
  TENSOR_PAYLOAD: [400, 'a payload was read, but does not describe tensors that refit can load'],
  WEIGHT_LOADER: [400, 'a custom weight loader failed, or did not return weights; nothing has changed'],
  WEIGHTS_UNKNOWN_NAME: [400, 'a tensor name that the model does not have'],
  WEIGHTS_MISMATCH: [400, 'a tensor of another shape or dtype than the model expects'],
  WEIGHTS_INCOMPLETE: [400, 'tensors are missing, and all are required'],
  SHARD_LAYOUT: [400, "a trainer's shards are not laid out as announced, or overlap; nothing has changed"],
  SHARDS_INCOMPLETE: [400, 'no rank of the trainer holds a part of a tensor, or tensors are not announced'],
  PLAN_STALE: [409, 'the server has no shard plan of this id and digest; announce the shards again'],
  WEIGHTS_TORN: [500, 'a write failed midway; the named tensors are torn'],
  CATCH_UP_FAILED: [
    500,
    'tensors that an update did not bring could not be copied to the second set of weights; those in use have not ' +
    'changed'
  ],
  ADAPTER_UNKNOWN: [404, 'no LoRA adapter of that name is loaded'],
  ADAPTER_REFUSED: [400, "a LoRA adapter's configuration or tensors do not fit this engine; nothing has changed"],
  ADAPTERS_FULL: [503, 'there is no room for another LoRA adapter; nothing has changed'],
  GROUP_REFUSED: [
    400,
    'a process group cannot be joined; the message gives the reason, and nothing was joined if it was known before'
  ],
  GROUP_BROKEN: [
    502,
    'a process group broke: a peer ended, closed its connection or sent an invalid message; initialise it again'
  ],
  BROADCAST_SPENT: [
    409,
    'an update through a process group failed after its trainer had begun to send; ' +
    'the same request again would wait for bytes that are never sent'
  ],
  GROUP_TIMEOUT: [
    504,
    'another rank of a process group did not come, or made no progress, for longer than --group-timeout; ' +
    'initialise it again'
  ],
  CONFIG: [400, 'a flag, variable or key of the configuration is wrong'],
  NATIVE_MISSING: [500, 'the native addon is not built'],
  INTERNAL: [500, 'a defect of refit']
} as const

export type ErrorCode = keyof typeof CODES

/** The table, for documentation and tests. */
export const ERROR_CODES: Readonly<Record<ErrorCode, readonly [status: number, meaning: string]>> = CODES

/** The only error class: a code of the table, a message (what was wrong, expected and got) and the field at fault. */
export class RefitError extends Error {
  override readonly name = 'RefitError'
  readonly code: ErrorCode
  readonly statusCode: number
  /** The request field, flag or tensor at fault. */
  readonly param: string | undefined
  /** Fields that a reply has beside the usual ones. */
  readonly details: Readonly<Record<string, unknown>> | undefined

  constructor (
    code: ErrorCode,
    message: string,
    options: { param?: string, cause?: unknown, details?: Record<string, unknown> } = {}
  ) {
    super(message, options.cause === undefined ? undefined : { cause: options.cause })
    this.code = code
    this.statusCode = CODES[code][0]
    this.param = options.param
    this.details = options.details
  }
}

/** The message of anything thrown; JavaScript can throw values that are no Error. */
export function errorMessage (thrown: unknown): string {
  return thrown instanceof Error ? thrown.message : String(thrown)
}

/** The same error with a text before its message. Errors that are no RefitError are returned unchanged. */
export function withPrefix (prefix: string, error: unknown): unknown {
  if (!(error instanceof RefitError) || prefix === '') return error
  return new RefitError(error.code, prefix + error.message, {
    cause: error,
    ...error.param === undefined ? {} : { param: error.param }
  })
}
