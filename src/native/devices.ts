// The GPUs of this machine and the libraries that compute on them.

export interface CudaGpu {
  /** As the CUDA runtime counts, after CUDA_VISIBLE_DEVICES. */
  ordinal: number
  name: string
  /** `GPU-` and 32 hexadecimal digits in groups, as nvidia-smi prints it. */
  uuid: string
  /** `0000:3b:00.0` */
  pciBusId: string
  /** `9.0` */
  computeCapability: string
  multiprocessors: number
  totalBytes: number
  freeBytes: number
  /** Memory can be released and come back at the same addresses. */
  virtualMemory: boolean
  /** The GPU uses the system's memory. */
  integrated: boolean
  /** Why this library cannot compute on it: too old, or no kernels for it. */
  error?: string
}

/** A library that is looked for at run time. */
export interface CudaLibrary {
  name: 'cuBLASLt' | 'NCCL'
  /** Path of the file and its version; absent if it is missing. */
  path?: string
  version?: string
  /** Why it is missing: every place that was tried. */
  tried?: string
}

export interface CudaGpus {
  /** Why no GPU can be used at all, as a sentence with the cure. `gpus` is empty then. */
  error?: string
  /**
   * `13.0`: the newest CUDA that the driver supports, and the one that the library was built with. Empty if unknown.
   */
  driverCuda: string
  runtimeCuda: string
  /** `580.65.06`: the version of the kernel module; empty if there is none. */
  driverVersion: string
  /** Architectures that have kernels, `90` or `80, 90, 100, 120, 120 (PTX)`. */
  architectures: string
  gpus: CudaGpu[]
  /** [from][to] whether a GPU can access another's memory. */
  peerAccess: boolean[][]
  libraries: CudaLibrary[]
}

/** Memory that a core with this configuration needs on each of its GPUs, in bytes. */
export interface CudaMemoryNeeds {
  weightBytes: number
  /** The second set of weights. */
  spareBytes: number
  kvBytes: number
  /** Activations, logits and workspace. */
  scratchBytes: number
  /**
   * Memory that is never released: exchange between GPUs, step blocks, and an estimate for graphs, the driver and its
   * libraries.
   */
  fixedBytes: number
}
