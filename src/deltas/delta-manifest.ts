import { RefitError } from '../errors.ts'

/**
 * The change of one tensor: the bytes under `key` in a file of the version's folder, and the checksum of the tensor's
 * `bytes` afterwards.
 */
export interface DeltaRecord {
  name: string
  bytes: number
  file: string
  key: string
  checksum: string
  algorithm: 'xxh3-128' | 'sha256'
}

export interface DeltaManifest {
  version: number
  base: number
  records: DeltaRecord[]
}

/**
 * manifest.json of a version that SkyRL has published (weight_sync/delta_checkpoint.py). Throws CHECKPOINT_FORMAT or
 * UNSUPPORTED.
 */
export function readManifest (
  { version, base_version: base, tensors = [] }: Readonly<Record<string, unknown>>,
  path: string
): DeltaManifest {
  if (!Number.isSafeInteger(version) || !Number.isSafeInteger(base)) {
    throw broken(path, 'version and base_version must be integers')
  }
  if (!Array.isArray(tensors)) throw broken(path, 'tensors must be a list')
  const records = tensors.map((tensor: unknown, index) => readRecord(tensor, `${path}: tensors[${index}]`))
  const names = new Set<string>()
  for (const { name } of records) {
    if (names.has(name)) throw broken(path, `"${name}" is changed twice`)
    names.add(name)
  }
  return { version: Number(version), base: Number(base), records }
}

function readRecord (value: unknown, where: string): DeltaRecord {
  if (typeof value !== 'object' || value === null) throw broken(where, 'must be an object')
  const fields = value as Record<string, unknown>
  const text = (name: string): string => {
    const found = fields[name]
    if (typeof found !== 'string' || found === '') throw broken(where, `${name} must be a text`)
    return found
  }
  const bytes = fields.uncompressed_num_bytes
  if (!Number.isSafeInteger(bytes) || Number(bytes) < 0) {
    throw broken(where, 'uncompressed_num_bytes must be a number of bytes')
  }
  const file = text('payload_file')
  if (file.includes('/') || file.includes('\0') || file === '.' || file === '..') {
    throw broken(
      where,
      `payload_file ${JSON.stringify(file)} must be the name of a file in the folder of the manifest`
    )
  }
  // The first versions supported no other algorithm, and named the field after it.
  const isOld = fields.checksum === undefined
  const algorithm = isOld ? 'sha256' : fields.checksum_algorithm ?? 'xxh3-128'
  if (algorithm !== 'xxh3-128' && algorithm !== 'sha256') {
    throw new RefitError(
      'UNSUPPORTED',
      `${where}: checksum_algorithm ${JSON.stringify(algorithm)}; expected xxh3-128 or sha256`
    )
  }
  return {
    name: text('name'),
    bytes: Number(bytes),
    file,
    key: text('payload_key'),
    checksum: text(isOld ? 'sha256' : 'checksum'),
    algorithm
  }
}

function broken (where: string, message: string): RefitError {
  return new RefitError('CHECKPOINT_FORMAT', `${where}: ${message}`)
}
