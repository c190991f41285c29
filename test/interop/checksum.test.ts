import { spawnSync } from 'node:child_process'
import { readFileSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import { native } from '../../src/native/load-addon.ts'
import { packageRoot } from '../../src/root.ts'
import { codedJob } from '../native/helpers/coded.ts'
import { plainModel } from '../native/helpers/plain-core.ts'

const addon = native()
const python = process.env.REFIT_PYTHON ?? 'python3'

t.test('the Python of docs/checksum.md gives the checksums of the addon for a safetensors file', async t => {
  const page = readFileSync(join(packageRoot, 'docs/checksum.md'), 'utf8')
  const code = [...page.matchAll(/```python\n([^]*?)```/g)].map(match => match[1]).join('\n')
  t.match(code, /def checksum/)
  t.match(code, /def stored/)
  for (const [dtype, torch, numpy] of [['bfloat16', 'bfloat16', 'int16'], ['float32', 'float32', 'int32']] as const) {
    const folder = t.testdir()
    const { config, tensors } = plainModel({ dtype })
    const coded = codedJob(tensors, { dtype })
    writeFileSync(join(folder, 'bytes'), (coded.job.sources[0] as { buffer: Uint8Array }).buffer)
    writeFileSync(
      join(folder, 'check.py'),
      `${code}
import sys, torch
from safetensors.torch import save_file
folder, tensors = sys.argv[1], json.loads(sys.argv[2])
data = np.fromfile(folder + '/bytes', np.${numpy})
held, at = {}, 0
for tensor in tensors:
    count = tensor['rows'] * tensor['cols']
    part = data[at:at + count].reshape(tensor['rows'], tensor['cols']).copy()
    held[tensor['name']] = torch.from_numpy(part).view(torch.${torch})
    at += count
save_file(held, folder + '/model.safetensors')
for tensor in tensors:
    name = tensor['name']
    assert checksum(stored(folder + '/model.safetensors', name)) == checksum(held[name].view(torch.${numpy}).numpy())
    print(checksum(stored(folder + '/model.safetensors', name)))
`
    )
    const { status, stdout, stderr } = spawnSync(python, [join(folder, 'check.py'), folder, JSON.stringify(tensors)], {
      encoding: 'utf8'
    })
    t.equal(status, 0, stderr)
    const core = addon.createCore(config)
    await addon.write(core, coded.job)
    const sums = await addon.checksum(core, coded.job.rects, Float64Array.from(tensors, tensor => tensor.cols))
    t.strictSame(stdout.trim().split('\n'), [...sums].map(sum => sum.toString(16).padStart(16, '0')))
    addon.closeCore(core)
  }
})
