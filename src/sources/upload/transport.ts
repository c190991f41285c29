import type { Transport } from '../../contract/weight-source.ts'

export const UPLOAD: Transport = { name: 'upload', readError: 'CHECKPOINT_FORMAT' }
