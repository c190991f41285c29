import type { Architecture } from './architecture.ts'
import { isObject, show } from './config-fields.ts'
import type { ConfigFields } from './config-fields.ts'
import type { Family } from './families.ts'
import { RefitError } from '../errors.ts'

const MAX_ID = 2 ** 31 - 1

/** Begin and end of sequence: from generation_config.json, else from config.json, else the family's defaults. */
export function parseTokenIds (
  config: ConfigFields,
  generationConfig: unknown,
  family: Family
): Pick<Architecture, 'bosTokenId' | 'eosTokenIds'> {
  if (generationConfig !== undefined && generationConfig !== null && !isObject(generationConfig)) {
    throw new RefitError(
      'MODEL_CONFIG',
      `generation_config.json: expected a JSON object, got ${show(generationConfig)}`
    )
  }
  const generation = isObject(generationConfig) ? generationConfig : {}
  const ids = (field: string, fallback: number | null): number[] => {
    const own = generation[field] ?? undefined
    if (own !== undefined) return toIds(own, `generation_config.json: ${field}`, field)
    const value = config.get(field)
    if (value !== undefined) return toIds(value, `config.json: ${field}`, field)
    // null in the file means none, an absent field the default.
    return fallback === null || config.has(field) ? [] : [fallback]
  }
  return {
    bosTokenId: ids('bos_token_id', family.bosTokenId)[0] ?? null,
    eosTokenIds: ids('eos_token_id', family.eosTokenId)
  }
}

function toIds (value: unknown, where: string, param: string): number[] {
  const list: unknown[] = Array.isArray(value) ? value : [value]
  for (const id of list) {
    if (!Number.isSafeInteger(id) || (id as number) < 0 || (id as number) > MAX_ID) {
      throw new RefitError('MODEL_CONFIG', `${where}: expected a token id or a list of them, got ${show(value)}`, {
        param
      })
    }
  }
  return [...new Set(list as number[])]
}
