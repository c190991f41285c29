import { RefitError } from '../errors.ts'

/** What clients may speak besides SGLang's routes, OpenAI's and refit's own, which are always there. By name: whose it is. */
export const DIALECTS = {
  vllm: "vLLM's own, for RL: pause, sleep, weight transfer, `/inference/v1/generate`",
  skyrl: 'SkyRL',
  areal: "AReaL's vLLM mode",
  'prime-rl': 'prime-rl',
  'nemo-rl': 'NeMo-RL through Dynamo',
  trl: "TRL's `vllm-serve`",
  'checkpoint-engine': 'checkpoint-engine'
} as const

export type DialectName = keyof typeof DIALECTS

export const DIALECT_NAMES = Object.keys(DIALECTS) as DialectName[]

/** Empty: all of them. Throws CONFIG for a name that there is not. */
export function chooseDialects (names: readonly string[]): ReadonlySet<DialectName> {
  const unknown = names.find(name => !Object.hasOwn(DIALECTS, name))
  if (unknown !== undefined) {
    throw new RefitError(
      'CONFIG',
      `--dialects: expected ${DIALECT_NAMES.join(', ')}, got ${JSON.stringify(unknown)}`,
      { param: 'dialects' }
    )
  }
  return new Set(names.length === 0 ? DIALECT_NAMES : names as readonly DialectName[])
}
