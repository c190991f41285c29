import { Type } from 'typebox'
import { nullable, refusals, WeightsRefusal } from '../../src/http/schemas.ts'
import { weightsRoute } from '../../src/http/updates/update-route.ts'
import type { UpdateRoutes } from '../../src/http/updates/update-route.ts'

const ReleaseBody = Type.Object({
  name: nullable(Type.String(), 'Name under which tensors are kept (default: all names).')
}, { additionalProperties: false, title: 'ReleaseKeptTensorsRequest' })

const Released = Type.Object({
  success: Type.Literal(true),
  released: Type.Array(Type.Object({ name: Type.String(), generation: Type.Integer() }), {
    description: 'The kept tensors that were given back; empty if none were kept.'
  })
}, { title: 'KeptTensorsReleased', description: 'The mappings are closed, and the sender has its references back.' })

/** Gives back tensors that updates keep between requests (docs/tensor-updates.md). */
const kept: UpdateRoutes = async (app, { context }) => {
  weightsRoute(
    app,
    '/release_kept_tensors',
    {
      schema: {
        operationId: 'releaseKeptTensors',
        summary: 'Give back tensors that are kept between updates',
        description: 'Waits for running updates, as an update does.',
        tags: ['weights'],
        body: ReleaseBody,
        response: { 200: Released, ...refusals(WeightsRefusal) }
      }
    },
    async request => ({ success: true as const, released: await context.kept.release(request.body.name ?? undefined) })
  )
}

export default kept
