import type { Transport } from '../contract/weight-source.ts'

/** Weights that ranks of a process group send. */
export const DISTRIBUTED: Transport = { name: 'distributed', readError: 'INTERNAL', inPlace: true }
