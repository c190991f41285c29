import t from 'tap'
import { encodeNpy } from '../../../src/wire/trainers/npy.ts'

t.test('a .npy file equals the output of numpy.save', async t => {
  // np.save(f, np.arange(6, dtype=np.uint8).reshape(1, 3, 2)), in hexadecimal.
  const saved = Buffer.concat([
    Buffer.from('\x93NUMPY\x01\x00\x76\x00', 'latin1'),
    Buffer.from("{'descr': '|u1', 'fortran_order': False, 'shape': (1, 3, 2), }".padEnd(117) + '\n'),
    Buffer.from([0, 1, 2, 3, 4, 5])
  ])
  t.same(encodeNpy(Uint8Array.of(0, 1, 2, 3, 4, 5), [1, 3, 2]), saved)
  const wide = encodeNpy(Uint16Array.of(258, 3), [2])
  t.match(wide.toString('latin1'), /'descr': '<u2', 'fortran_order': False, 'shape': \(2,\), \}/)
  t.same([...wide.subarray(-4)], [2, 1, 3, 0])
  for (const shape of [[0, 3, 2], [100_000_000_000, 0, 5]]) {
    const empty = encodeNpy(new Uint8Array(0), shape)
    t.equal(empty.length % 64, 0)
    t.equal(empty.length, 10 + empty.readUInt16LE(8))
  }
  t.throws(() => encodeNpy(new Uint8Array(5), [1, 3, 2]), { message: /1 x 3 x 2 has 6 values, not 5/ })
})
