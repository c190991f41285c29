// NumPy's format for one array, version 1.0 (numpy.org/neps/nep-0001-npy-format.html).

const ALIGNMENT = 64

/** A file with a float32 matrix, row-major. */
export function encodeNpy (values: Float32Array, rows: number, columns: number): Buffer {
  const text = `{'descr': '<f4', 'fortran_order': False, 'shape': (${rows}, ${columns}), }`
  // Magic, version and the header's length take 10 bytes, the newline at its end takes one.
  const total = Math.ceil((10 + text.length + 1) / ALIGNMENT) * ALIGNMENT
  const head = Buffer.alloc(total, ' ')
  head.write('\x93NUMPY\x01\x00', 'latin1')
  head.writeUInt16LE(total - 10, 8)
  head.write(text, 10)
  head.write('\n', total - 1)
  return Buffer.concat([head, new Uint8Array(values.buffer, values.byteOffset, values.byteLength)])
}
