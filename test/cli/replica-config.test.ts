import t from 'tap'
import { replicaConfig } from '../../src/cli/replica-config.ts'
import { loadConfig } from '../../src/config/load-config.ts'

function configs (...args: string[]): ReturnType<typeof replicaConfig>[] {
  const { config } = loadConfig(['model', ...args], {})
  return Array.from({ length: config.dp }, (_, rank) => replicaConfig(config, rank, 8))
}

t.test('engines on GPUs have GPUs of their own', t => {
  const gpus = (...args: string[]): unknown[] =>
    configs(...args).map(({ device, baseGpuId, tp }) => [device, baseGpuId, tp])
  t.same(gpus('--dp', '3', '--tp', '2', '--device', 'cuda'), [['cuda', 0, 2], ['cuda', 2, 2], ['cuda', 4, 2]])
  t.same(gpus('--dp-size', '2', '--device', 'cuda:3'), [['cuda', 3, 1], ['cuda', 4, 1]])
  t.same(gpus('--data-parallel-size', '2', '--device', 'cuda', '--base-gpu-id', '1', '--tp', '4'), [
    ['cuda', 1, 4],
    ['cuda', 5, 4]
  ])
  t.same(configs('--dp', '2', '--device', 'cuda', '--mem-fraction', '0.8').map(config => config.memFraction), [
    0.8,
    0.8
  ])
  t.end()
})

t.test('engines on a CPU share its threads and its memory', t => {
  const parts = (...args: string[]): unknown[] =>
    configs(...args).map(({ threads, memFraction }) => [threads, memFraction])
  t.same(parts('--dp', '2'), [[4, 0.25], [4, 0.25]])
  t.same(parts('--dp', '2', '--threads', '3', '--mem-fraction', '0.8'), [[3, 0.4], [3, 0.4]])
  t.same(parts('--dp', '16')[0], [1, 0.5 / 16])
  t.end()
})

t.test('engines listen on the loopback, are one engine each, and draw different seeds', t => {
  const made = configs('--dp', '2', '--host', '0.0.0.0', '--insecure', '--port', '80', '--random-seed', '7')
  for (const { host, port, dp } of made) t.same([host, port, dp], ['127.0.0.1', 0, 1])
  t.same(made.map(({ randomSeed }) => randomSeed), [7, 7 + 2 ** 32])
  t.same(configs('--dp', '2').map(({ randomSeed }) => randomSeed), [null, null])
  t.end()
})
