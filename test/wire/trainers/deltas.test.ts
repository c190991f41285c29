import t from 'tap'
import { readDeltaSpec } from '../../../src/wire/trainers/verl-delta.ts'
import { zipEntries } from '../../../src/wire/zip-entries.ts'
import { zstdContentBytes } from '../../../src/wire/trainers/zstd-frame.ts'
import { signedGet } from '../../../src/sources/disk/s3-object.ts'

const utf8 = (text: string): Uint8Array => new TextEncoder().encode(text)
const param = {
  name: 'w',
  dtype: 'bfloat16',
  shape: [2, 3],
  pos_start: 0,
  pos_end: 8,
  pos_width: 4,
  val_start: 0,
  val_end: 2
}

t.test("a delta's spec keeps all 65 bits of its checksum, also if a name looks like one", async t => {
  const name = 'a "checksum": 7 b'
  const text = JSON.stringify({ encoding: 'indices', checksum: 'C', params: [{ ...param, name }] }).replace(
    '"C"',
    '36893488147419103231'
  )
  const spec = readDeltaSpec(utf8(text), 8, 2)
  t.equal(spec.checksum, 36893488147419103231n)
  t.match(spec, {
    encoding: 'indices',
    verify: false,
    isLast: false,
    params: [{ name, shape: [2, 3], positions: [0, 8], values: [0, 2] }]
  })
})

t.test('a spec with wrong fields is refused', async t => {
  const told = (fields: object, one: object = {}): Uint8Array =>
    utf8(JSON.stringify({ encoding: 'indices', checksum: 0, params: [{ ...param, ...one }], ...fields }))
  const cases: Array<[Uint8Array, RegExp]> = [
    [utf8('[]'), /not JSON of a delta/],
    [utf8('{'), /not JSON/],
    [Uint8Array.of(0xff), /not JSON/],
    [told({ encoding: 'bits' }), /encoding is "bits"/],
    [told({ checksum: 1.5 }), /checksum|not JSON/],
    [told({ checksum: -1 }), /checksum|not JSON/],
    [told({ checksum: 'abc' }), /checksum/],
    [told({ checksum: '9'.repeat(60) }), /checksum/],
    [told({ params: null }), /params is no list/],
    [told({}, { name: 3 }), /params\[0\] has no name/],
    [told({}, { dtype: 'int8' }), /int8/],
    [told({}, { shape: [-1] }), /shape/],
    [told({}, { val_end: '2' }), /from where to where/],
    [told({}, { shape: [2 ** 30, 2 ** 30, 2 ** 30] }), /too big/],
    [told({}, { pos_width: 2 }), /2 bytes each/],
    [told({}, { pos_start: 1, pos_end: 9 }), /begin at byte 1/],
    [told({ encoding: 'dense' }), /2 values for \[2, 3\]/],
    [told({ params: [] }), /0 bytes of positions and 0 values, and there are 8 and 2/]
  ]
  for (const [spec, message] of cases) t.throws(() => readDeltaSpec(spec, 8, 2), { code: 'TENSOR_PAYLOAD', message })
})

function zip (files: Record<string, Uint8Array>, change: (central: Buffer) => void = () => {}): Buffer {
  const locals: Buffer[] = []
  const entries: Buffer[] = []
  let at = 0
  for (const [name, data] of Object.entries(files)) {
    const local = Buffer.alloc(30)
    local.writeUInt32LE(0x04034b50, 0)
    local.writeUInt16LE(name.length, 26)
    local.writeUInt16LE(5, 28)
    const entry = Buffer.alloc(46)
    entry.writeUInt32LE(0x02014b50, 0)
    entry.writeUInt32LE(data.length, 20)
    entry.writeUInt32LE(data.length, 24)
    entry.writeUInt16LE(name.length, 28)
    entry.writeUInt32LE(at, 42)
    change(entry)
    locals.push(local, Buffer.from(name), Buffer.alloc(5), Buffer.from(data))
    entries.push(entry, Buffer.from(name))
    at += 30 + name.length + 5 + data.length
  }
  const directory = Buffer.concat(entries)
  const end = Buffer.alloc(22)
  end.writeUInt32LE(0x06054b50, 0)
  end.writeUInt16LE(Object.keys(files).length, 10)
  end.writeUInt32LE(at, 16)
  return Buffer.concat([...locals, directory, end])
}

t.test('entries of a zip archive are views of its bytes, and inconsistent archives are refused', async t => {
  const archive = zip({ 'a/data.pkl': utf8('one'), 'a/data/0': Uint8Array.of(1, 2, 3) })
  const entries = zipEntries(archive)
  t.same([...entries].map(([name, data]) => [name, Buffer.from(data).toString('latin1')]), [['a/data.pkl', 'one'], [
    'a/data/0',
    '\x01\x02\x03'
  ]])
  t.equal(entries.get('a/data/0')!.buffer, archive.buffer)
  for (let cut = 0; cut < archive.length; cut++) {
    t.throws(() => zipEntries(archive.subarray(0, cut)), { code: 'TENSOR_PAYLOAD' })
  }
  for (
    const [change, message] of [
      [(entry: Buffer) => {
        entry.writeUInt16LE(8, 10)
      }, /compressed/],
      [(entry: Buffer) => {
        entry.writeUInt32LE(9999, 20)
        entry.writeUInt32LE(9999, 24)
      }, /behind the directory/],
      [(entry: Buffer) => {
        entry.writeUInt32LE(7, 42)
      }, /not where its directory says/],
      [(entry: Buffer) => {
        entry.writeUInt16LE(60000, 28)
      }, /breaks off|not where|twice/]
    ] as Array<[(entry: Buffer) => void, RegExp]>
  ) t.throws(() => zipEntries(zip({ a: utf8('x'), b: utf8('y') }, change)), { code: 'TENSOR_PAYLOAD', message })
})

t.test('the content size of a Zstandard frame is read in each of its forms', async t => {
  const frame = (descriptor: number, ...rest: number[]): Uint8Array =>
    Uint8Array.from([0x28, 0xb5, 0x2f, 0xfd, descriptor, ...rest, ...new Array<number>(16).fill(0)])
  t.equal(zstdContentBytes(frame(0x20, 9)), 9)
  t.equal(zstdContentBytes(frame(0x60, 1, 1)), 257 + 256)
  t.equal(zstdContentBytes(frame(0xa0, 1, 2, 3, 4)), 0x04030201)
  t.equal(zstdContentBytes(frame(0xe3, 0, 0, 0, 0, 5)), 5, 'behind the id of a dictionary')
  t.equal(zstdContentBytes(frame(0x80, 0x58, 7)), 7, 'behind a window')
  t.throws(() => zstdContentBytes(frame(0x00, 0x58)), { message: /does not say how much/ })
  t.throws(() => zstdContentBytes(frame(0xc3).subarray(0, 14)), { message: /ends within its header/ })
  t.throws(() => zstdContentBytes(Uint8Array.of(1, 2, 3)), { message: /no Zstandard frame/ })
})

// AWS's documentation ("Authenticating Requests: Using the Authorization Header", GET Object) has this example with an
// additional Range header. This one was signed with botocore's algorithm as in test/contract/test_nemo_rl_sparse.py.
t.test('an object is requested from its own bucket, and no other host can be named', async t => {
  const env = {
    AWS_ACCESS_KEY_ID: 'AKIAIOSFODNN7EXAMPLE',
    AWS_SECRET_ACCESS_KEY: 'wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY'
  }
  const at = new Date('2013-05-24T00:00:00Z')
  const { url, headers } = await signedGet(
    { bucket: 'examplebucket', region: 'us-east-1', key: 'a b/test$file(1).text' },
    env,
    at
  )
  t.equal(url.href, 'https://examplebucket.s3.us-east-1.amazonaws.com/a%20b/test%24file%281%29.text')
  t.match(headers, {
    'x-amz-date': '20130524T000000Z',
    authorization:
      /^AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE\/20130524\/us-east-1\/s3\/aws4_request, SignedHeaders=host;x-amz-content-sha256;x-amz-date, Signature=[0-9a-f]{64}$/
  })
  // The signature was computed independently from AWS's description of it.
  const odd = await signedGet({ bucket: 'examplebucket', region: 'us-east-1', key: "k+/ü'!*~x%41/_.-" }, {
    ...env,
    AWS_SESSION_TOKEN: 'to/ken='
  }, at)
  t.equal(odd.url.href, 'https://examplebucket.s3.us-east-1.amazonaws.com/k%2B/%C3%BC%27%21%2A~x%2541/_.-')
  t.equal(odd.headers['x-amz-security-token'], 'to/ken=')
  t.match(odd.headers['authorization'], /Signature=6753de76a8409feaf1087a72d66cab85511f6ca32c0b5e24483739ef7c375dc8$/)
  t.equal(
    (await signedGet({ bucket: 'b', region: 'r', key: 'k' }, { AWS_ENDPOINT_URL: 'http://minio:9000/' }, at)).url.href,
    'http://minio:9000/b/k'
  )
  t.same((await signedGet({ bucket: 'b', region: 'r', key: 'k' }, {}, at)).headers, {}, 'unsigned without credentials')
  // A compose file that passes on variables that its user has not set.
  const unset = {
    AWS_ENDPOINT_URL: '',
    AWS_ENDPOINT_URL_S3: '',
    AWS_ACCESS_KEY_ID: '',
    AWS_SECRET_ACCESS_KEY: '',
    AWS_SESSION_TOKEN: ''
  }
  t.match(await signedGet({ bucket: 'b', region: 'r', key: 'k' }, unset, at), {
    url: { href: 'https://b.s3.r.amazonaws.com/k' }
  })
  t.same((await signedGet({ bucket: 'b', region: 'r', key: 'k' }, unset, at)).headers, {})
  t.equal(
    (await signedGet({ bucket: 'b', region: 'r', key: 'k' }, { ...unset, AWS_ENDPOINT_URL: 'http://minio:9000' }, at))
      .url
      .href,
    'http://minio:9000/b/k'
  )
  t.equal(
    (await signedGet({ bucket: 'a.b', region: 'r', key: 'k' }, {}, at)).url.href,
    'https://s3.r.amazonaws.com/a.b/k',
    'no certificate of AWS is for a.b.s3'
  )
  t.equal(
    (await signedGet({ bucket: 'b', region: 'cn-north-1', key: 'k' }, {}, at)).url.href,
    'https://b.s3.cn-north-1.amazonaws.com.cn/k'
  )
})
