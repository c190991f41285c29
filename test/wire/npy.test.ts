import t from 'tap'
import { encodeNpy } from '../../src/wire/npy.ts'

t.test('a matrix is written as numpy.save writes it', t => {
  const values = new Float32Array([9, 1, -2.5, -Infinity, 0, 4, 5, 9]).subarray(1, 7)
  const bytes = encodeNpy(values, 2, 3)
  const header = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }"
  t.equal(bytes.toString('latin1', 0, 128), `\x93NUMPY\x01\x00\x76\x00${header.padEnd(117)}\n`)
  t.equal(bytes.length, 128 + 24)
  t.same(Array.from(values, (_, i) => bytes.readFloatLE(128 + 4 * i)), [1, -2.5, -Infinity, 0, 4, 5])
  for (const rows of [1, 10, 99999, 10 ** 9]) {
    const empty = encodeNpy(new Float32Array(0), rows, 0)
    t.equal(empty.length % 64, 0)
    t.equal(empty.readUInt16LE(8), empty.length - 10)
  }
  t.end()
})
