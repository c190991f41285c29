import { Type } from 'typebox'
import type { Routes, WeightsContext } from '../../src/http/context.ts'
import { nullable, refusals, WeightsRefusal } from '../../src/http/schemas.ts'

const ReleaseBody = Type.Object({
  name: nullable(Type.String(), 'Default: all.')
}, { additionalProperties: false, title: 'ReleaseKeptTensorsRequest' })

const Released = Type.Object({
  success: Type.Literal(true),
  released: Type.Array(Type.Object({ name: Type.String(), generation: Type.Integer() }), {
    description: 'What was kept, and is given back. Nothing was, where it is empty.'
  })
}, { title: 'KeptTensorsReleased', description: 'The mappings are closed, and the sender has its references back.' })

/** Gives back tensors that updates keep between requests (docs/tensor-updates.md). */
const kept: Routes<WeightsContext> = async (app, { context }) => {
  app.post(
    '/release_kept_tensors',
    {
      config: { auth: 'admin', errors: 'weights' },
      schema: {
        operationId: 'releaseKeptTensors',
        summary: 'Give back tensors that are kept between updates',
        description: 'Waits for the updates under way, as an update does.',
        tags: ['weights'],
        body: ReleaseBody,
        response: { 200: Released, ...refusals(WeightsRefusal) }
      }
    },
    async request => ({ success: true as const, released: await context.kept.release(request.body.name ?? undefined) })
  )
}

export default kept
