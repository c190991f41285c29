import { mkdirSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { readArchitecture } from '../../../src/model/read-config.ts'
import { encodeHeader } from '../../../src/wire/safetensors/encode.ts'
import { peftTensors, testAdapter } from '../adapters.ts'

/** Writes a random adapter of all linear layers of a model, as PEFT saves it. Returns its folder. */
export async function saveAdapter (
  modelPath: string,
  folder: string,
  variant: number,
  { rank = 4, size = 1 }: { rank?: number, size?: number } = {}
): Promise<string> {
  const only = (module: string): boolean => !/embed_tokens|lm_head/.test(module)
  const adapter = testAdapter(await readArchitecture(modelPath), { rank, variant, only, size })
  const tensors = peftTensors(adapter)
  mkdirSync(folder, { recursive: true })
  writeFileSync(join(folder, 'adapter_config.json'), JSON.stringify(adapter.config))
  writeFileSync(
    join(folder, 'adapter_model.safetensors'),
    Buffer.concat([
      encodeHeader(tensors.map(({ name, shape }) => ({ name, dtype: 'F32', shape }))),
      ...tensors.map(({ data }) => data)
    ])
  )
  return folder
}
