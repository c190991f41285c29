import { Type } from 'typebox'
import { nullable } from '../schemas.ts'

// Fields of requests whose tensors come in buckets of a ZeroMQ peer.

export const zmqHandles = Type.Record(Type.String(), Type.String(), {
  description:
    "UUID of each GPU (`GPU-...`) -> ZeroMQ endpoint of the parameter server's process on it: ipc://@name or " +
    'ipc:///path. Entries of other GPUs are ignored. Or rank (`0`, `1`, ...) -> endpoint, one for each rank.'
})

export const ipcTimeout = nullable(
  Type.Number({ exclusiveMinimum: 0, maximum: 86400 }),
  "refit's own: longest time of the whole exchange in seconds (default 3600)."
)
