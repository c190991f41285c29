import { itemBytes } from '../checkpoint.ts'
import type { Tensor } from '../checkpoint.ts'
import { everyTransport, transportsNamed } from '../context.ts'
import type { Context } from '../context.ts'
import { definePromise, expect, NotOffered } from '../promise.ts'
import type { Transport } from '../transports/transport.ts'

const GROUP = 'refusals'

/** B whose last suitable tensor is replaced by what `change` makes of it. All tensors before it are right. */
function withLie (
  context: Context,
  suits: (tensor: Tensor) => boolean,
  change: (tensor: Tensor) => Tensor
): { tensors: Tensor[], name: string } {
  const tensors = [...context.variants.B.tensors]
  const { isTied } = context.model
  const at = tensors.findLastIndex(tensor => suits(tensor) && !(isTied && tensor.name.startsWith('lm_head')))
  if (at < 0) throw new NotOffered('the model has no tensor for this')
  const [lie] = tensors.splice(at, 1)
  tensors.push(change(lie!))
  return { tensors, name: lie!.name }
}

function lie (
  id: string,
  title: string,
  suits: (tensor: Tensor) => boolean,
  change: (tensor: Tensor) => Tensor
): ReturnType<typeof definePromise> {
  return definePromise(GROUP, id, {
    title,
    ways: everyTransport(),
    check: async (context, transport: Transport) => {
      const { tensors, name } = withLie(context, suits, change)
      const reply = await transport.send(tensors, { label: context.newLabel() })
      return await context.expectRefusal(reply, `an update whose last tensor is a wrong ${name}`)
    }
  })
}

const isMatrix = ({ shape }: Tensor): boolean => shape.length === 2 && shape[0] !== shape[1] && shape[0]! > 1

export const unknownName = lie(
  'unknown-name',
  'An update with an unknown name is refused, and nothing of it is written.',
  () => true,
  tensor => ({ ...tensor, name: tensor.name + '.conformance' })
)

export const transposed = lie(
  'transposed',
  'An update with a shape of the right size in the wrong order is refused, and nothing of it is written.',
  isMatrix,
  tensor => ({ ...tensor, shape: [...tensor.shape].reverse() })
)

export const shortShape = lie(
  'short-shape',
  'An update with a tensor of one row less is refused, and nothing of it is written.',
  isMatrix,
  ({ shape, bytes, ...tensor }) => ({
    ...tensor,
    shape: [shape[0]! - 1, shape[1]!],
    bytes: () => bytes().subarray(0, bytes().length / shape[0]! * (shape[0]! - 1))
  })
)

export const wrongDtype = lie(
  'wrong-dtype',
  'An update with integers in place of floats is refused, and nothing of it is written.',
  ({ dtype }) => itemBytes(dtype) === 2 || itemBytes(dtype) === 4,
  tensor => ({ ...tensor, dtype: itemBytes(tensor.dtype) === 2 ? 'int16' : 'int32' })
)

export const repeatedName = definePromise(GROUP, 'repeated-name', {
  title: 'An update with two tensors of one name is refused, and nothing of it is written.',
  // The header of a file is a JSON object, which has each name once.
  ways: transportsNamed('tensor', 'bucket', 'distributed'),
  check: async (context, transport: Transport) => {
    const [first] = context.variants.C.tensors
    const reply = await transport.send([...context.variants.B.tensors, first!], { label: context.newLabel() })
    return await context.expectRefusal(reply, `an update with ${first!.name} twice`)
  }
})

export const empty = definePromise(GROUP, 'empty', {
  title: 'An update without tensors changes no weight; a checkpoint without tensors is refused.',
  ways: everyTransport(),
  check: async (context, transport) => {
    if (context.server.kind === 'vllm' && transport.takesParts) {
      throw new NotOffered("vLLM's empty lists repeat the last announcement")
    }
    const reply = await transport.send([])
    if (!transport.takesParts) return await context.expectRefusal(reply, 'a checkpoint without tensors')
    await context.expectServing('A', `after an update without tensors (${reply.text})`)
    return reply.text
  }
})

export const incomplete = definePromise(GROUP, 'incomplete', {
  title: 'A checkpoint that lacks a tensor is refused, or the reply names the tensor.',
  ways: transportsNamed('disk', 'upload'),
  check: async (context, transport: Transport) => {
    const { tensors } = context.variants.B
    const missing = tensors.find(({ shape, name }) => shape.length === 2 && !/embed|lm_head/.test(name)) ?? tensors[0]!
    const reply = await transport.send(tensors.filter(tensor => tensor !== missing))
    if (!reply.ok) return await context.expectRefusal(reply, `a checkpoint without ${missing.name}`)
    const isNamed = JSON.stringify(reply.body).includes(missing.name)
    expect(isNamed, `a checkpoint without ${missing.name} was accepted, and the reply does not name it: ${reply.text}`)
    return 'accepted, and the missing name is in the reply'
  }
})
