import t from 'tap'
import { ELEMENTS } from '../../../src/native/dtypes.ts'
import { TORCH_STORAGES, torchItemBytes, torchStorageDType } from '../../../src/wire/torch/dtypes.ts'

// Names and sizes as torch 2.13 reports them: torch.HalfStorage.dtype, torch.half, torch.half.itemsize.

t.test('classes of storages have the dtype that torch gives them', t => {
  const torch = {
    BFloat16Storage: 'bfloat16',
    BoolStorage: 'bool',
    ByteStorage: 'uint8',
    CharStorage: 'int8',
    DoubleStorage: 'float64',
    FloatStorage: 'float32',
    HalfStorage: 'float16',
    IntStorage: 'int32',
    LongStorage: 'int64',
    ShortStorage: 'int16'
  }
  t.same(Object.fromEntries(TORCH_STORAGES.map(name => [name, torchStorageDType(name)])), torch)
  t.end()
})

t.test("torch's other names stand for its dtypes", t => {
  t.same(Object.fromEntries(ELEMENTS.flatMap(([name, { alias }]) => alias === undefined ? [] : [[alias, name]])), {
    half: 'float16',
    float: 'float32',
    double: 'float64',
    short: 'int16',
    int: 'int32',
    long: 'int64',
    chalf: 'complex32',
    cfloat: 'complex64',
    cdouble: 'complex128'
  })
  t.end()
})

t.test('elements of payloads have the sizes of torch', t => {
  const bytes = { bfloat16: 2, float16: 2, float32: 4, float64: 8, uint8: 1, int8: 1, bool: 1, int16: 2, uint16: 2 }
  const more = { int32: 4, uint32: 4, int64: 8, uint64: 8 }
  for (const [name, size] of Object.entries({ ...bytes, ...more })) t.equal(torchItemBytes(name), size, name)
  t.equal(torchItemBytes('float8_e4m3fn'), undefined, 'refused')
  t.end()
})
