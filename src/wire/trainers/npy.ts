// NumPy's file format, version 1.0 (numpy.lib.format): magic, version, length of the header, header (a Python literal,
// padded with spaces so that the data begins at a multiple of 64), data in C order.

const MAGIC = Buffer.from('\x93NUMPY\x01\x00', 'latin1')
const ALIGNMENT = 64
const TYPES = { uint8: '|u1', uint16: '<u2' } as const

/** The bytes of a .npy file. */
export function encodeNpy (values: Uint8Array | Uint16Array, shape: readonly number[]): Buffer {
  const count = shape.reduce((product, size) => product * size, 1)
  if (count !== values.length) {
    throw new Error(`an array of ${shape.join(' x ')} has ${count} values, not ${values.length}`)
  }
  const type = values instanceof Uint8Array ? TYPES.uint8 : TYPES.uint16
  const text = `{'descr': '${type}', 'fortran_order': False, 'shape': (${shape.join(', ')}${
    shape.length === 1 ? ',' : ''
  }), }`
  const fixed = MAGIC.length + 2
  const length = Math.ceil((fixed + text.length + 1) / ALIGNMENT) * ALIGNMENT - fixed
  const header = Buffer.alloc(fixed + length, ' ')
  MAGIC.copy(header)
  header.writeUInt16LE(length, MAGIC.length)
  header.write(text, fixed, 'latin1')
  header.write('\n', fixed + length - 1, 'latin1')
  return Buffer.concat([header, Buffer.from(values.buffer, values.byteOffset, values.byteLength)])
}
