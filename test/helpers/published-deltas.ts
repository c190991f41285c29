import { createHash } from 'node:crypto'
import { mkdirSync, readFileSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { encodeSafetensors } from '../../src/wire/safetensors/encode.ts'
import { headerLength, parseHeader, PREFIX_BYTES } from '../../src/wire/safetensors/header.ts'

// Deltas of a checkpoint as trainers publish them. The Zstandard frames (RFC 8878) are written by hand, because Node 20
// has no Zstandard.

export type Weights = Map<string, Buffer>

const BLOCK = 2 ** 17

/** A frame of uncompressed blocks. */
export function zstdFrame (content: Uint8Array): Buffer {
  const parts: Uint8Array[] = [Uint8Array.of(0x28, 0xb5, 0x2f, 0xfd, 0x00, 10 << 3)]
  for (let at = 0; at < content.length; at += BLOCK) {
    parts.push(
      blockHead(0, Math.min(BLOCK, content.length - at)),
      content.subarray(at, at + BLOCK)
    )
  }
  return Buffer.concat([...parts, Uint8Array.of(1, 0, 0)])
}

/** A few bytes that decompress to `blocks` times 128 KiB. */
export function zstdBomb (byte: number, blocks: number): Buffer {
  const parts = Array.from({ length: blocks }, () => Buffer.concat([blockHead(1, BLOCK), Uint8Array.of(byte)]))
  return Buffer.concat([Uint8Array.of(0x28, 0xb5, 0x2f, 0xfd, 0x00, 10 << 3), ...parts, Uint8Array.of(1, 0, 0)])
}

function blockHead (type: number, size: number): Uint8Array {
  const word = size << 3 | type << 1
  return Uint8Array.of(word & 255, word >> 8 & 255, word >> 16 & 255)
}

/** RFC 1950. */
export function adler32 (bytes: Uint8Array): string {
  let a = 1
  let b = 0
  for (const byte of bytes) {
    a = (a + byte) % 65521
    b = (b + a) % 65521
  }
  return (b * 65536 + a).toString(16).padStart(8, '0')
}

export function sha256 (bytes: Uint8Array): string {
  return createHash('sha256').update(bytes).digest('hex')
}

/** Changes some bytes of every third tensor. */
export function changed (weights: Weights, seed: number): Weights {
  return new Map([...weights].map(([name, old], index) => {
    const now = Buffer.from(old)
    if (index % 3 !== seed % 3) { for (let at = seed % 7; at < now.length; at += 11) now[at]! ^= seed * 37 + at | 1 }
    return [name, now]
  }))
}

/** The tensors in files of a folder, read without the code under test. */
export function weightsOf (folder: string, files: readonly string[]): Weights {
  return new Map(files.flatMap(file => {
    const data = readFileSync(join(folder, file))
    const length = headerLength(data.subarray(0, PREFIX_BYTES), data.length, file)
    const { tensors } = parseHeader(data.subarray(PREFIX_BYTES, PREFIX_BYTES + length), data.length, file)
    return tensors.map(({ name, begin, end }) => [name, data.subarray(begin, end)] as [string, Buffer])
  }))
}

export function xorOf (before: Uint8Array, after: Uint8Array): Buffer {
  return Buffer.from(after.map((byte, index) => byte ^ before[index]!))
}

function overwriteOf (before: Buffer, after: Buffer): Buffer {
  const at = [...after.keys()].filter(index => after[index] !== before[index])
  return Buffer.concat([words([at.length]), words(at), Buffer.from(at.map(index => after[index]!))])
}

function words (values: readonly number[]): Buffer {
  const out = Buffer.alloc(values.length * 4)
  for (const [index, value] of values.entries()) out.writeUInt32LE(value, index * 4)
  return out
}

export function writeFile (
  path: string,
  entries: ReadonlyMap<string, Uint8Array>,
  metadata: Record<string, string> = { format: 'pt' }
): void {
  writeFileSync(
    path,
    encodeSafetensors(
      [...entries].map(([name, data]) => ({
        name,
        dtype: 'U8' as const,
        shape: [data.length],
        data: Buffer.from(data)
      })),
      metadata
    )
  )
}

export interface SlimeDelta {
  encoding?: 'xor' | 'overwrite'
  checksum?: (bytes: Uint8Array) => string
  metadata?: Record<string, unknown>
  edit?: (entries: Map<string, Buffer>, sums: Record<string, string>) => void
}

/** A version's folder as slime publishes it, in two files. */
export function publishSlime (
  source: string,
  version: number,
  before: Weights,
  after: Weights,
  { encoding = 'xor', checksum = adler32, metadata = {}, edit }: SlimeDelta = {}
): string {
  const folder = join(source, `weight_v${String(version).padStart(6, '0')}`)
  mkdirSync(folder, { recursive: true })
  const names = [...after.keys()].filter(name => !after.get(name)!.equals(before.get(name)!))
  const weightMap: Record<string, string> = {}
  for (const part of [0, 1]) {
    const entries = new Map<string, Buffer>()
    const sums: Record<string, string> = {}
    for (const name of names.filter((_, index) => index % 2 === part)) {
      const [old, now] = [before.get(name)!, after.get(name)!]
      entries.set(name, zstdFrame(encoding === 'xor' ? xorOf(old, now) : overwriteOf(old, now)))
      sums[name] = checksum(now)
    }
    if (part === 0) edit?.(entries, sums)
    const file = `model-0000${part}-of-00002.safetensors`
    writeFile(join(folder, file), entries, sums)
    for (const name of entries.keys()) weightMap[name] = file
  }
  const about = {
    version: String(version).padStart(6, '0'),
    base_version: String(version - 1).padStart(6, '0'),
    delta_encoding: encoding,
    compression_format: 'zstd',
    checksum_format: 'adler32',
    ...metadata
  }
  writeFileSync(
    join(folder, 'model.safetensors.index.json'),
    JSON.stringify({ metadata: about, weight_map: weightMap })
  )
  return folder
}

interface Manifest {
  version: number
  base_version: number
  tensors: Array<Record<string, unknown>>
  payload_files: string[]
}

/** A version as SkyRL publishes it. */
export function publishSkyrl (
  sync: string,
  version: number,
  before: Weights,
  after: Weights,
  edit: (manifest: Manifest) => void = () => {}
): string {
  const folder = join(sync, `delta-${String(version).padStart(8, '0')}`)
  mkdirSync(folder, { recursive: true })
  const names = [...after.keys()].filter(name => !after.get(name)!.equals(before.get(name)!))
  const manifest: Manifest = { version, base_version: version - 1, tensors: [], payload_files: [] }
  for (const part of [0, 1]) {
    const file = `delta-rank00000-file00000${part}.safetensors`
    const entries = new Map(
      names.filter((_, index) => index % 2 === part).map(name => [
        `key of ${name}`,
        zstdFrame(xorOf(before.get(name)!, after.get(name)!))
      ])
    )
    writeFile(join(folder, file), entries)
    manifest.payload_files.push(file)
    for (const [key, data] of entries) {
      const name = key.slice('key of '.length)
      const bytes = after.get(name)!.length
      manifest.tensors.push({
        name,
        dtype: 'uint8',
        shape: [bytes],
        uncompressed_num_bytes: bytes,
        compressed_num_bytes: data.length,
        payload_file: file,
        payload_key: key,
        checksum: sha256(after.get(name)!),
        checksum_algorithm: 'sha256'
      })
    }
  }
  edit(manifest)
  writeFileSync(join(folder, 'manifest.json'), JSON.stringify(manifest))
  return folder
}

/** Tensors with arbitrary bytes, in two files, and the other files of a checkpoint. */
export function makeBase (folder: string): { files: string[], weights: Weights } {
  mkdirSync(folder, { recursive: true })
  const weights: Weights = new Map(
    [1, 2, 64, 1000, 4097, 0, 131_073].map((size, index) => [
      `layer.${index}`,
      Buffer.from(Array.from({ length: size }, (_, at) => at * 31 + index & 255))
    ])
  )
  const files = ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
  for (const [part, file] of files.entries()) {
    writeFile(
      join(folder, file),
      new Map([...weights].filter((_, index) => index % 2 === part))
    )
  }
  writeFileSync(join(folder, 'config.json'), '{"model_type": "any"}')
  return { files, weights }
}
