import { readFileSync } from 'node:fs'
import type { Test } from 'tap'
import type { ModelTable } from '../../src/model/architecture.ts'
import { buildModelTable } from '../../src/model/model-table.ts'
import { blobOf, gpuUuid, cudaServer, event, segment, Sender } from './cuda-tensors.ts'
import type { CudaServer, CudaTensor, Event, Segment } from './cuda-tensors.ts'
import { tinyArchitecture, tinyConfig } from './tiny-config.ts'
import { codedChecksum, codedTensor } from './memory-source.ts'

// A whole model of position-coded tensors on a sender's GPUs, and the checks after an update from it.

export interface Sent {
  tensors: CudaTensor[]
  sender: Sender
  segments: Segment[]
  events: Event[]
}

/** The whole model: `perSegment` tensors per segment (Infinity: a pooled sender), each with a handle of its own. */
export function sendModel (
  t: Test,
  table: ModelTable,
  variant: number,
  { perSegment = 3, device = gpuUuid(0) as number | string, version = 2, events = true } = {}
): Sent {
  const sender = new Sender(t)
  const plans = [...table.tensors.values()].filter(plan => !plan.alternative)
  const sent: Sent = { tensors: [], sender, segments: [], events: [] }
  for (let from = 0; from < plans.length; from += perSegment) {
    const part = plans.slice(from, from + perSegment)
    const parts = part.map(({ name, rows, cols }) => Buffer.from(codedTensor(variant, name, rows * cols).buffer))
    const memory = segment(t, Buffer.concat(parts))
    const done = events ? event(t) : null
    sent.segments.push(memory)
    if (done !== null) sent.events.push(done)
    let at = 0
    for (const [index, { name, shape }] of part.entries()) {
      sent.tensors.push({
        name,
        shape,
        device,
        blob: blobOf(memory, version),
        storageBytes: parts[index]!.length,
        storageOffset: at,
        share: sender.share(),
        event: done?.handle ?? null
      })
      at += parts[index]!.length
    }
  }
  return sent
}

export async function checkVariant (t: Test, server: CudaServer, table: ModelTable, variant: number): Promise<void> {
  const { checksums } = await server.ok('/weights_checker', { action: 'checksum' })
  const wrong = Object
    .entries(checksums as Record<string, string>)
    .filter(([name, checksum]) => checksum !== codedChecksum(table, name, variant))
    .map(([name]) => name)
  t.same(wrong, [], `every tensor is that of variant ${variant}`)
}

/** Checks that nothing of a sender is open and that all its references are released. */
export async function checkIdle (t: Test, server: CudaServer, sender?: Sender): Promise<void> {
  t.equal(await server.metric('cuda_segments_opened_total'), await server.metric('cuda_segments_closed_total'))
  t.equal(await server.metric('tensor_files_opened_total'), await server.metric('tensor_files_closed_total'))
  t.equal(mapped(), 0, 'nothing of a sender is mapped')
  if (sender !== undefined) t.equal(sender.held, 0, 'every reference was given back, once')
}

export function mapped (): number {
  return readFileSync('/proc/self/maps', 'utf8').split('\n').filter(line => /refit_(segment|event)_/.test(line)).length
}

/** A server for tests that do not depend on the architecture. */
export async function serve (t: Test, tp = 1): Promise<{ server: CudaServer, table: ModelTable }> {
  return {
    server: await cudaServer(t, tinyConfig('Qwen3ForCausalLM'), { tp }),
    table: buildModelTable(tinyArchitecture('Qwen3ForCausalLM'), tp)
  }
}
