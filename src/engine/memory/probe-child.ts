import { writeSync } from 'node:fs'
import { native } from '../../native/load-addon.ts'

// Looks at the GPUs for probe-gpus.ts. A broken driver may crash this process.

const text = Buffer.from(JSON.stringify(native().cudaGpus()))
for (let at = 0; at < text.length;) at += writeSync(1, text, at)
// Skips the driver's own exit handlers.
native().endProcess(0)
