import t from 'tap'
import { chooseGpus, firstGpu, fullest } from '../../src/engine/memory/choose-gpus.ts'
import type { CudaGpu, CudaGpus } from '../../src/native/devices.ts'

const gpu = (ordinal: number, more: Partial<CudaGpu> = {}): CudaGpu => ({
  ordinal,
  name: 'NVIDIA H100',
  uuid: `GPU-${ordinal}`,
  pciBusId: `0000:0${ordinal}:00.0`,
  computeCapability: '9.0',
  multiprocessors: 132,
  totalBytes: 80e9,
  freeBytes: 79e9 - ordinal * 1e9,
  virtualMemory: true,
  integrated: false,
  ...more
})
const found = (gpus: CudaGpu[], error?: string): CudaGpus => ({
  driverCuda: '13.0',
  runtimeCuda: '13.0',
  driverVersion: '580.65.06',
  architectures: '90',
  gpus,
  peerAccess: gpus.map(() => gpus.map(() => true)),
  libraries: [],
  ...error === undefined ? {} : { error }
})

t.test('either option can name the first GPU', async (t) => {
  t.equal(firstGpu('cpu', null), null)
  t.equal(firstGpu('cuda', null), 0)
  t.equal(firstGpu('cuda', 3), 3)
  t.equal(firstGpu('cuda:2', null), 2)
  t.equal(firstGpu('cuda:2', 2), 2)
  t.throws(() => firstGpu('cuda:2', 1), {
    code: 'CONFIG',
    message: '--device cuda:2 and --base-gpu-id 1 name different GPUs; leave one out'
  })
  t.throws(() => firstGpu('cpu', 1), { code: 'CONFIG', message: /--base-gpu-id: the CPU has no GPUs/ })
  for (const device of ['cuda:', 'cuda:x', 'cudas', 'tpu', '']) {
    t.throws(() => firstGpu(device, null), { code: 'CONFIG', message: /expected cpu, cuda or cuda:N/ })
  }
})

t.test('ranks use neighbouring GPUs, and an error lists the missing and the visible ones', async (t) => {
  const four = found([0, 1, 2, 3].map((ordinal) => gpu(ordinal)))
  t.same(chooseGpus(four, 1, 2).map(({ ordinal }) => ordinal), [1, 2])
  t.equal(fullest(chooseGpus(four, 1, 2)).gpu.ordinal, 2)
  t.throws(() => chooseGpus(four, 4, 1), {
    code: 'CONFIG',
    param: 'device',
    message: /^--device cuda:4: there is no GPU 4; visible are 4 \(0: NVIDIA H100 GPU-0, .*CUDA_VISIBLE_DEVICES/
  })
  t.throws(() => chooseGpus(four, 2, 4), {
    code: 'CONFIG',
    param: 'tp',
    message: /^--tp 4: it needs 4 GPUs, 2 to 5; visible are 4/
  })
  t.throws(() => chooseGpus(found([gpu(0)]), 0, 2), {
    message: /^--tp 2: it needs 2 GPUs, 0 to 1; visible is one \(0: NVIDIA H100 GPU-0\)/
  })
  t.throws(() => chooseGpus(found([]), 0, 1), { message: /no GPU is visible/ })
  t.throws(() => chooseGpus(found([], 'there is no NVIDIA driver; install one'), 0, 1), {
    code: 'CONFIG',
    message: '--device cuda: there is no NVIDIA driver; install one'
  })
})

t.test('a GPU that cannot compute is refused only if a rank would use it', async (t) => {
  const mixed = found([gpu(0), gpu(1, { name: 'Tesla V100', error: 'compute capability 7.0 is too old' })])
  t.equal(chooseGpus(mixed, 0, 1).length, 1)
  t.throws(() => chooseGpus(mixed, 0, 2), {
    code: 'CONFIG',
    message: '--device cuda: GPU 1 (Tesla V100): compute capability 7.0 is too old'
  })
})

t.test('ranks that may share GPUs are placed on them in turn and divide their memory', async (t) => {
  const chosen = chooseGpus(found([gpu(0), gpu(1)]), 1, 2, true)
  t.same(chosen.map(({ ordinal }) => ordinal), [1, 1])
  t.equal(fullest(chosen).freeBytes, Math.floor(gpu(1).freeBytes / 2))
  const four = found([0, 1, 2, 3].map((ordinal) => gpu(ordinal)))
  t.same(chooseGpus(four, 1, 2, true), chooseGpus(four, 1, 2))
})
