import t from 'tap'
import { masterPolicy } from '../../src/rendezvous/master-policy.ts'
import { ownAddresses, resolveMaster } from '../../src/rendezvous/resolve-master.ts'
import { Deadline } from '../../src/rendezvous/deadline.ts'

const allowed = (address: string, patterns: string[] = [], host = address, own: string[] = []): boolean =>
  masterPolicy(patterns, own).refusal(address, host) === undefined
const deadline = (timeoutMs = 60_000, signal?: AbortSignal): Deadline => new Deadline({ timeoutMs, signal }, 0)

t.test('loopback and private addresses are allowed, others are not', async t => {
  for (
    const address of [
      '127.0.0.1',
      '127.255.0.9',
      '10.0.0.7',
      '172.16.0.1',
      '172.31.255.255',
      '192.168.7.7',
      '::1',
      'fd12::7',
      'fc00::1',
      '::ffff:10.0.0.7',
      '::ffff:7f00:1',
      '64:ff9b::a00:7',
      '2002:a00:7::1'
    ]
  ) {
    t.ok(allowed(address), address)
  }
  for (
    const address of [
      '8.8.8.8',
      '172.32.0.1',
      '172.15.255.255',
      '192.169.0.1',
      '11.0.0.1',
      '100.64.0.1',
      '2001:db8::1',
      '::ffff:8.8.8.8',
      '64:ff9b::808:808',
      '2002:808:808::1',
      '::8.8.8.8',
      '::2'
    ]
  ) {
    t.notOk(allowed(address), address)
  }
})

t.test('link-local, metadata and non-host addresses are refused whatever is allowed', async t => {
  const all = [
    '*',
    '169.254.0.0/16',
    '169.254.169.254',
    'fe80::/10',
    '::/0',
    '0.0.0.0/0',
    'metadata.google.internal',
    '*.internal'
  ]
  for (
    const address of [
      '169.254.169.254',
      '169.254.170.2',
      '169.254.0.1',
      'fe80::1',
      'fe80::1%eth0',
      'febf::1',
      'fd00:ec2::254',
      'fd20:ce::254',
      '168.63.129.16',
      '100.100.100.200',
      '192.0.0.192',
      '0.0.0.0',
      '0.1.2.3',
      '224.0.0.1',
      '255.255.255.255',
      '::',
      'ff02::1',
      '::ffff:169.254.169.254',
      '::ffff:a9fe:a9fe',
      '0:0:0:0:0:ffff:a9fe:a9fe',
      '64:ff9b::a9fe:a9fe',
      '64:ff9b::169.254.169.254',
      '2002:a9fe:a9fe::',
      '::169.254.169.254',
      '::ffff:0:a9fe:a9fe'
    ]
  ) {
    t.notOk(allowed(address, all, 'metadata.google.internal', [address.replace(/%.*/, '')]), address)
  }
})

t.test('patterns allow addresses, networks, names and all', async t => {
  t.ok(allowed('8.8.8.8', ['8.8.8.8']))
  t.notOk(allowed('8.8.8.9', ['8.8.8.8']))
  t.ok(allowed('100.64.3.4', ['100.64.0.0/10']))
  t.notOk(allowed('100.128.0.1', ['100.64.0.0/10']))
  t.ok(allowed('2001:db8::7', ['2001:db8::/32']))
  t.ok(allowed('2001:db8::7', ['[2001:db8::7]']))
  t.ok(allowed('8.8.8.8', ['*']))
  t.ok(allowed('2001:db8::7', ['*']))
  t.ok(allowed('8.8.8.8', ['trainer.example.com'], 'Trainer.Example.COM.'))
  t.ok(allowed('8.8.8.8', ['*.example.com'], 'a.b.example.com'))
  t.notOk(allowed('8.8.8.8', ['*.example.com'], 'example.com'))
  t.notOk(allowed('8.8.8.8', ['*.example.com'], 'example.com.evil.net'))
  t.notOk(allowed('8.8.8.8', ['*.example.com'], 'notexample.com'))
  t.notOk(allowed('8.8.8.8', ['trainer.example.com'], '8.8.8.8'))
  t.ok(allowed('8.8.8.8', [], '8.8.8.8', ['8.8.8.8']), 'an address of this machine')
  for (
    const pattern of [
      '',
      '10.0.0.0/33',
      '10.0.0/8',
      '::/129',
      '10.0.0.0/8/8',
      '10.0.0.0/-1',
      '10.0.0.0/',
      '0x7f.1',
      '2130706433',
      'a b',
      '*x',
      'a.*.com',
      '**',
      'http://x'
    ]
  ) {
    t.throws(() => masterPolicy([pattern]), { code: 'CONFIG' }, JSON.stringify(pattern))
  }
})

t.test('a name is looked up once, and only its allowed addresses are used', async t => {
  let asked = 0
  const find = async (host: string): Promise<string[]> => {
    asked++
    return {
      trainer: ['169.254.169.254', '10.0.0.7', '8.8.8.8', 'fd00::7'],
      outside: ['8.8.8.8', '8.8.4.4'],
      meta: ['169.254.169.254'],
      none: []
    }[host] ?? (() => {
      throw new Error('ENOTFOUND')
    })()
  }
  const policy = masterPolicy()
  t.same(await resolveMaster({ host: 'trainer', port: 1 }, policy, deadline(), find), {
    host: '10.0.0.7',
    port: 1,
    alternatives: ['fd00::7']
  })
  t.equal(asked, 1)
  await t.rejects(resolveMaster({ host: 'outside', port: 1 }, policy, deadline(), find), {
    code: 'MASTER_REFUSED',
    message:
      'master_address "outside" is 8.8.8.8, 8.8.4.4: it is neither loopback nor private: allow it with --allow-master'
  })
  await t.rejects(resolveMaster({ host: 'meta', port: 1 }, masterPolicy(['*']), deadline(), find), {
    code: 'MASTER_REFUSED',
    message: /never connected to/
  })
  await t.rejects(resolveMaster({ host: 'none', port: 1 }, policy, deadline(), find), {
    code: 'MASTER_REFUSED',
    message: /has no address/
  })
  await t.rejects(resolveMaster({ host: 'unknown', port: 1 }, policy, deadline(), find), {
    code: 'STORE_UNREACHABLE',
    message: /ENOTFOUND/
  })
  await t.rejects(
    resolveMaster({ host: 'slow', port: 1 }, policy, deadline(20), async () => await new Promise(() => {})),
    { code: 'DEADLINE' }
  )
  await t.rejects(
    resolveMaster(
      { host: 'slow', port: 1 },
      policy,
      deadline(9999, AbortSignal.abort(new Error('stop'))),
      async () => await new Promise(() => {})
    ),
    { message: 'stop' }
  )
})

t.test('addresses are used as written, without brackets and zone, and numeric tricks are refused', async t => {
  const policy = masterPolicy()
  const never = async (): Promise<string[]> => {
    throw new Error('nothing to look up')
  }
  const resolved = async (host: string): Promise<string> =>
    (await resolveMaster({ host, port: 29500 }, policy, deadline(), never)).host
  for (
    const [host, expected] of [
      ['127.0.0.1', '127.0.0.1'],
      ['[::1]', '::1'],
      ['::1', '::1'],
      [' 10.0.0.7 ', '10.0.0.7'],
      ['::1%lo', '::1'],
      ['0.0.0.0', '127.0.0.1'],
      ['[::]', '::1']
    ] as const
  ) t.equal(await resolved(host), expected, host)
  for (
    const host of [
      '2130706433',
      '2852039166',
      '0x7f.0.0.1',
      '0177.0.0.1',
      '127.1',
      '10.0.0.01',
      '0xa9fea9fe',
      '169.254.169.254.',
      '1.2.3.4.5',
      'a.0x1',
      '::1:',
      ':::',
      '[10.0.0.7',
      'a:29500',
      '',
      'a b',
      'user@host',
      'http://host',
      'x'.repeat(254),
      'a\0b'
    ]
  ) await t.rejects(resolved(host), { code: 'INVALID_REQUEST', param: 'master_address' }, JSON.stringify(host))
  for (const host of ['[fe80::1%eth0]', '169.254.169.254', '8.8.8.8']) {
    await t.rejects(resolved(host), { code: 'MASTER_REFUSED', param: 'master_address' }, host)
  }
  for (const port of [0, -1, 65536, 1.5, NaN]) {
    await t.rejects(resolveMaster({ host: '127.0.0.1', port }, policy, deadline(), never), {
      code: 'INVALID_REQUEST',
      param: 'master_port'
    }, `${port}`)
  }
})

t.test('the system resolves localhost, and the addresses of this machine include the loopback', async t => {
  const { host } = await resolveMaster({ host: 'localhost', port: 1 }, masterPolicy(), deadline())
  t.ok(['127.0.0.1', '::1'].includes(host), host)
  t.ok(ownAddresses().includes('127.0.0.1'))
})
