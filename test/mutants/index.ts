import { deltas } from './deltas.ts'
import { engine } from './engine.ts'
import { gateway } from './gateway.ts'
import { grammars } from './grammars.ts'
import { http } from './http.ts'
import { jsonCost } from './json-cost.ts'
import { model } from './model.ts'
import type { Mutant } from './mutant.ts'
import { nativeCodec } from './native-codec.ts'
import { nativeCore } from './native-core.ts'
import { nativeCpu } from './native-cpu.ts'
import { nativeCuda } from './native-cuda.ts'
import { nativeTransport } from './native-transport.ts'
import { peer } from './peer.ts'
import { processGroups } from './process-groups.ts'
import { shadow } from './shadow.ts'
import { sources } from './sources.ts'
import { speculation } from './speculation.ts'
import { text } from './text.ts'
import { weights } from './weights.ts'
import { wire } from './wire.ts'

/** All mutants, by the part of the program that they are in. `npm run test:mutants` plants them. */
export const AREAS: Readonly<Record<string, readonly Mutant[]>> = {
  weights,
  shadow,
  sources,
  wire,
  engine,
  speculation,
  http,
  'json cost': jsonCost,
  gateway,
  peer,
  deltas,
  'process-groups': processGroups,
  grammars,
  text,
  model,
  'native core': nativeCore,
  'native cpu': nativeCpu,
  'native codec': nativeCodec,
  'native transport': nativeTransport,
  'native cuda': nativeCuda
}
