import { spawn } from 'node:child_process'
import { createServer } from 'node:net'
import type { AddressInfo } from 'node:net'
import { join } from 'node:path'
import { createInterface } from 'node:readline'
import { packageRoot } from '../../src/root.ts'
import { python } from './baseline.ts'

export interface GlooPeer {
  torch: string
  /** The tensors that it broadcasts, in this order. */
  tensors: { name: string, shape: number[] }[]
  /** A command of bench/python/gloo_peer.py; returns its own milliseconds. */
  ask: (
    word: { do: string, group: string, port?: number, rank?: number, world?: number, way?: string }
  ) => Promise<number>
  end: () => void
}

/** A torch process that joins gloo groups, with the tensors of a checkpoint. */
export async function glooPeer (checkpoint: string, threads: number): Promise<GlooPeer> {
  const child = spawn(python(), [join(packageRoot, 'bench/python/gloo_peer.py'), checkpoint, String(threads)], {
    env: { ...process.env, OMP_NUM_THREADS: String(threads), GLOO_SOCKET_IFNAME: 'lo' },
    stdio: ['pipe', 'pipe', 'inherit']
  })
  const lines = createInterface({ input: child.stdout })[Symbol.asyncIterator]()
  const next = async (): Promise<unknown> => {
    const { value, done } = await lines.next()
    if (done === true) throw new Error('bench/python/gloo_peer.py has ended')
    return JSON.parse(value)
  }
  const { torch, tensors } = await next() as GlooPeer
  return {
    torch,
    tensors,
    ask: async (word) => {
      child.stdin.write(`${JSON.stringify(word)}\n`)
      return (await next() as { ms: number }).ms
    },
    end: () => {
      child.stdin.end()
    }
  }
}

/** A free port. */
export async function freePort (): Promise<number> {
  return await new Promise((resolve, reject) => {
    const server = createServer()
    server.once('error', reject)
    server.listen(0, '127.0.0.1', () => {
      const { port } = server.address() as AddressInfo
      server.close(() => {
        resolve(port)
      })
    })
  })
}
