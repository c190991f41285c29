import { Type } from 'typebox'

const Problem = Type.Object({ id: Type.String(), url: Type.String(), state: Type.String(), message: Type.String() }, {
  title: 'EngineProblem'
})
export const fleetFields = {
  weight_version: Type.Union([Type.String(), Type.Null()], { description: 'Label of the current weights.' }),
  errors: Type.Array(Problem, { description: 'Engines that are down or hold other weights, with the reason.' })
}
