import { readArchitecture } from '../model/read-config.ts'
import type { DType } from '../native/dtypes.ts'

/** The dtype that the config.json of a checkpoint names. */
export async function checkpointDType (modelPath: string): Promise<DType> {
  return (await readArchitecture(modelPath)).dtype
}
