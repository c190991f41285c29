import { readFileSync, rmSync, truncateSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { transportsNamed } from '../context.ts'
import type { Context } from '../context.ts'
import { definePromise } from '../promise.ts'
import type { DiskTransport } from '../transports/disk.ts'
import type { UploadTransport } from '../transports/upload.ts'
import { copySideFiles, safetensorsHeader, writeFolder } from '../variants.ts'
import { INDEX_NAME, SINGLE_NAME } from '../../wire/safetensors/index.ts'

const GROUP = 'files'
const PREFIX_BYTES = 8

/** A promise that a broken checkpoint is refused; `spoil` turns a folder with B into it. */
function spoiled (id: string, title: string, spoil: (folder: string, context: Context) => void): ReturnType<
  typeof definePromise
> {
  return definePromise(GROUP, id, {
    title,
    ways: transportsNamed('disk'),
    check: async (context, disk: DiskTransport) =>
      await disk.withFolder(async folder => {
        const { A, B } = context.variants
        copySideFiles(A.folder, folder)
        writeFolder(folder, B.tensors)
        spoil(folder, context)
        return await context.expectRefusal(await disk.load(folder, context.newLabel()), title)
      })
  })
}

export const noFolder = spoiled('no-folder', 'A folder that does not exist is refused.', folder => {
  rmSync(folder, { recursive: true })
})

export const truncated = spoiled(
  'truncated',
  'A file that is cut off is refused, and nothing of it is written.',
  folder => {
    const path = join(folder, SINGLE_NAME)
    truncateSync(path, Math.floor(readFileSync(path).length / 2))
  }
)

export const cutHeader = spoiled('cut-header', 'A file whose header is longer than the file is refused.', folder => {
  const path = join(folder, SINGLE_NAME)
  const bytes = readFileSync(path)
  bytes.writeBigUInt64LE(BigInt(bytes.length * 2))
  writeFileSync(path, bytes)
})

export const falseOffsets = spoiled(
  'false-offsets',
  'A file with two tensors at the same bytes is refused, and nothing of it is written.',
  (folder, { variants }) => {
    const path = join(folder, SINGLE_NAME)
    writeFileSync(path, overlap(readFileSync(path), variants.B.tensors.map(({ name }) => name)))
  }
)

export const missingShard = spoiled(
  'missing-shard',
  'A checkpoint whose index names an absent file is refused, and nothing of it is written.',
  (folder, { variants }) => {
    const { tensors } = variants.B
    const files = tensors.map(({ name }, i) => [name, i < tensors.length / 2 ? 'one.safetensors' : 'two.safetensors'])
    rmSync(join(folder, SINGLE_NAME))
    const half = tensors.slice(0, Math.ceil(tensors.length / 2))
    writeFileSync(
      join(folder, 'one.safetensors'),
      Buffer.concat([safetensorsHeader(half), ...half.map(({ bytes }) => bytes())])
    )
    writeFileSync(join(folder, INDEX_NAME), JSON.stringify({ weight_map: Object.fromEntries(files) }))
  }
)

export const outside = spoiled(
  'outside',
  'A checkpoint whose index names a file of another folder is refused.',
  (folder, { variants }) => {
    rmSync(join(folder, SINGLE_NAME))
    const files = variants.B.tensors.map(({ name }) => [name, `../B/${SINGLE_NAME}`])
    writeFileSync(join(folder, INDEX_NAME), JSON.stringify({ weight_map: Object.fromEntries(files) }))
  }
)

export const tooLong = definePromise(GROUP, 'too-long', {
  title: 'An upload that is longer than its header says is refused, and nothing of it is written.',
  ways: transportsNamed('upload'),
  check: async (context, upload: UploadTransport) => {
    const { tensors } = context.variants.B
    const bytes = [safetensorsHeader(tensors), ...tensors.map(tensor => tensor.bytes()), Buffer.alloc(64, 1)]
    const reply = await upload.sendBytes(Buffer.concat(bytes), { label: context.newLabel() })
    return await context.expectRefusal(reply, 'an upload with 64 bytes too many')
  }
})

/** The second tensor claims the first tensor's place if both have the same size, else a place that overlaps it. */
function overlap (file: Buffer, names: readonly string[]): Buffer {
  const length = Number(file.readBigUInt64LE())
  const header = JSON.parse(file.toString('utf8', PREFIX_BYTES, PREFIX_BYTES + length))
  const [begin, end] = header[names[1]!].data_offsets
  const item = Math.min(end - begin, 16)
  header[names[1]!].data_offsets = [begin - item, end - item]
  const text = Buffer.from(JSON.stringify(header))
  const prefix = Buffer.alloc(PREFIX_BYTES)
  prefix.writeBigUInt64LE(BigInt(text.length))
  return Buffer.concat([prefix, text, file.subarray(PREFIX_BYTES + length)])
}
