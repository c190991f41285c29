// The GPUs of this machine and the libraries that compute on them.

export interface CudaGpu {
  /** As the CUDA runtime counts after CUDA_VISIBLE_DEVICES. */
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
  /** The card uses the system's memory. */
  integrated: boolean
  /** Why this library cannot compute on it (too old, no kernels for it). */
  error?: string
}

/** A library that is looked for at run time. */
export interface CudaLibrary {
  name: 'cuBLASLt' | 'NCCL'
  /** Where it was found, and its version; absent where it is missing. */
  path?: string
  version?: string
  /** Why it is missing: every place tried. */
  tried?: string
}

export interface CudaGpus {
  /** Why no card can be used at all, in a sentence with its cure. Then `cards` is empty. */
  error?: string
  /** `13.0`: the newest CUDA that the driver knows, and the one that the library was built with. Empty where unknown. */
  driverCuda: string
  runtimeCuda: string
  /** `580.65.06`: the kernel module's version; empty where there is none. */
  driverVersion: string
  /** What kernels are there for, `90` or `80, 90, 100, 120, 120 (PTX)`. */
  architectures: string
  gpus: CudaGpu[]
  /** [from][to] whether a card reaches another's memory. */
  peerAccess: boolean[][]
  libraries: CudaLibrary[]
}

/** What a core with this configuration needs of each of its cards, in bytes. */
export interface CudaMemoryNeeds {
  weightBytes: number
  kvBytes: number
  /** Activations, logits and workspace. */
  scratchBytes: number
  /** What is never released: exchange between cards, step blocks, and what the driver and its libraries take (estimated). */
  fixedBytes: number
}
