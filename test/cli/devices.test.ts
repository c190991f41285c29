import t from 'tap'
import { describeDevices } from '../../src/cli/devices.ts'
import type { CudaGpu, CudaGpus } from '../../src/native/devices.ts'

const gpu = (ordinal: number, more: Partial<CudaGpu> = {}): CudaGpu => ({
  ordinal,
  name: 'NVIDIA H200',
  uuid: `GPU-00000000-0000-0000-0000-00000000000${ordinal}`,
  pciBusId: `0000:0${ordinal}:00.0`,
  computeCapability: '9.0',
  multiprocessors: 132,
  totalBytes: 150.1e9,
  freeBytes: 149.5e9,
  virtualMemory: true,
  integrated: false,
  ...more
})
const FOUND: CudaGpus = {
  driverCuda: '13.0',
  runtimeCuda: '13.0',
  driverVersion: '580.65.06',
  architectures: '90',
  gpus: [gpu(0), gpu(1), gpu(2, { virtualMemory: false, error: 'compute capability 7.0 is too old' })],
  peerAccess: [[true, true, false], [true, true, false], [false, false, true]],
  libraries: [{ name: 'cuBLASLt', path: '/usr/local/cuda/lib64/libcublasLt.so.13', version: '13.1.0' }, {
    name: 'NCCL',
    tried: 'libnccl.so.2: no such file\n/opt/libnccl.so.2: no such file'
  }]
}

t.test('GPUs, their peer access, driver and libraries are listed', async t => {
  t.equal(
    describeDevices(FOUND),
    `GPU 0: NVIDIA H200
  GPU-00000000-0000-0000-0000-000000000000, PCI 0000:00:00.0
  compute capability 9.0, 132 multiprocessors, 149.5 GB of 150.1 GB free
GPU 1: NVIDIA H200
  GPU-00000000-0000-0000-0000-000000000001, PCI 0000:01:00.0
  compute capability 9.0, 132 multiprocessors, 149.5 GB of 150.1 GB free
GPU 2: NVIDIA H200
  GPU-00000000-0000-0000-0000-000000000002, PCI 0000:02:00.0
  compute capability 9.0, 132 multiprocessors, 149.5 GB of 150.1 GB free
  memory cannot be released and resumed (no virtual memory management)
  cannot be used: compute capability 7.0 is too old

GPU 0 reaches the memory of 1
GPU 1 reaches the memory of 0
GPU 2 reaches the memory of no other
ranks of --tp on GPUs that all reach each other exchange by peer access, others by NCCL, which was not found

driver 580.65.06 (CUDA 13.0), refit's library: CUDA 13.0, kernels for 90
cuBLASLt 13.1.0: /usr/local/cuda/lib64/libcublasLt.so.13
NCCL not found; tried
  libnccl.so.2: no such file
  /opt/libnccl.so.2: no such file
`
  )
})

t.test('if every GPU reaches every other, one line reports it; one GPU needs none', async t => {
  t.match(
    describeDevices({ ...FOUND, gpus: FOUND.gpus.slice(0, 2) }),
    /\nevery GPU reaches the memory of every other: ranks of --tp exchange by peer access\n/
  )
  t.notMatch(describeDevices({ ...FOUND, gpus: FOUND.gpus.slice(0, 1) }), /reach/)
})

t.test('if GPUs do not reach each other, the NCCL that would connect them is named', async t => {
  const libraries: CudaGpus['libraries'] = [{ name: 'NCCL', path: '/opt/libnccl.so.2', version: '2.28.9' }]
  t.match(
    describeDevices({ ...FOUND, libraries }),
    'GPU 2 reaches the memory of no other\n' +
      'ranks of --tp on GPUs that all reach each other exchange by peer access, others by NCCL 2.28.9\n'
  )
})

t.test('without GPUs the report begins with the reason', async t => {
  const none: CudaGpus = {
    driverCuda: '',
    runtimeCuda: '',
    driverVersion: '',
    architectures: '',
    gpus: [],
    peerAccess: [],
    libraries: [],
    error: 'there is no driver'
  }
  t.equal(
    describeDevices(none),
    'no GPU can be used: there is no driver\n\n' +
      "driver not found (CUDA unknown), refit's library: CUDA not opened, kernels for none\n"
  )
})
