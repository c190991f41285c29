import t from 'tap'
import fc from 'fast-check'
import { zmtpGreeting, zmtpMessage, zmtpReady, ZmtpReader } from '../../../src/wire/trainers/zmtp.ts'
import type { ZmtpEvent } from '../../../src/wire/trainers/zmtp.ts'

const hex = (text: string): Buffer => Buffer.from(text.replaceAll(' ', ''), 'hex')
/** The greeting and READY that a REQ socket of libzmq 4.3.5 sends. */
const LIBZMQ = Buffer.concat([
  hex('ff 00 00 00 00 00 00 00 01 7f 03 01'),
  Buffer.from('NULL'),
  Buffer.alloc(16 + 32),
  hex('04 26 05'),
  Buffer.from('READY'),
  hex('0b'),
  Buffer.from('Socket-Type'),
  hex('00 00 00 03'),
  Buffer.from('REQ'),
  hex('08'),
  Buffer.from('Identity'),
  hex('00 00 00 00')
])

function read (bytes: Buffer, sizes: readonly number[] = []): ZmtpEvent[] {
  const reader = new ZmtpReader()
  const events: ZmtpEvent[] = []
  let at = 0
  for (const size of sizes) {
    events.push(...reader.push(bytes.subarray(at, at + size)))
    at += size
  }
  return [...events, ...reader.push(bytes.subarray(at))]
}

t.test('the greeting and the handshake are those of libzmq', async (t) => {
  t.equal(LIBZMQ.length, 64 + 2 + 0x26)
  t.same(read(LIBZMQ), [{ type: 'ready', socketType: 'REQ' }])
  t.equal(zmtpGreeting().length, 64)
  t.same(zmtpReady('REQ'), LIBZMQ.subarray(64))
  t.same(zmtpGreeting().subarray(9), LIBZMQ.subarray(9, 64))
})

t.test('written messages are read back, in pieces of any size', async (t) => {
  const frame = fc.oneof(
    fc.uint8Array({ maxLength: 20 }),
    fc.integer({ min: 250, max: 70_000 }).map(size => new Uint8Array(size).fill(size & 0xff))
  )
  const messages = fc.array(fc.array(frame, { minLength: 1, maxLength: 4 }), { maxLength: 4 })
  fc.assert(
    fc.property(messages, fc.array(fc.integer({ min: 0, max: 300 }), { maxLength: 40 }), (messages, sizes) => {
      const bytes = Buffer.concat([zmtpGreeting(), zmtpReady('REQ'), ...messages.map(frames => zmtpMessage(frames))])
      const [first, ...events] = read(bytes, sizes)
      t.ok(first?.type === 'ready')
      t.ok(
        events.every((event, index) =>
          event.type === 'message' && event.frames.length === messages[index]!.length && event
            .frames
            .every((got, at) => got.equals(messages[index]![at]!))
        )
      )
      return events
        .length === messages.length
    }),
    { numRuns: 60 }
  )
  t.same(read(Buffer.concat([LIBZMQ, hex('01 00 00 02 68 69')]), new Array<number>(200).fill(1)).at(-1), {
    type: 'message',
    frames: [Buffer.alloc(0), Buffer.from('hi')]
  }, 'byte by byte')
})

t.test('a heartbeat is reported with its context, and other commands are skipped', async (t) => {
  const events = read(
    Buffer.concat([
      LIBZMQ,
      hex('04 09 04'),
      Buffer.from('PING'),
      hex('00 0a 61 62'),
      hex('04 05 04'),
      Buffer.from('PONG')
    ])
  )
  t.same(events.slice(1), [{ type: 'ping', context: Buffer.from('ab') }])
})

t.test('invalid bytes are refused at once', async (t) => {
  const refused = (bytes: Buffer, message: RegExp): void => {
    t.throws(() => read(bytes), { code: 'ZMQ_PROTOCOL', message })
  }
  refused(Buffer.from('HTTP/1.1 400 Bad Request'), /does not speak ZMTP/)
  refused(hex('ff 00 00 00 00 00 00 00 01 7f 01'), /ZMTP 1/)
  const plain = zmtpGreeting()
  plain.write('PLAIN', 12, 'latin1')
  refused(plain, /"PLAIN"/)
  refused(Buffer.concat([zmtpGreeting(), zmtpMessage([Buffer.alloc(0), Buffer.alloc(1)])]), /before its READY/)
  refused(Buffer.concat([LIBZMQ, hex('80 00')]), /flags 128/)
  refused(Buffer.concat([LIBZMQ, hex('02 00 00 00 01 00 00 00 00')]), /more than 67108864 bytes/)
  refused(Buffer.concat([LIBZMQ, hex('02 ff ff ff ff ff ff ff ff')]), /more than 67108864 bytes/)
  refused(Buffer.concat([LIBZMQ, ...new Array<Buffer>(20).fill(hex('01 00'))]), /more than 16 frames/)
  refused(Buffer.concat([zmtpGreeting(), hex('04 0a 05'), Buffer.from('READY'), hex('ff 00 00 00')]), /cut off/)
  refused(
    Buffer.concat([LIBZMQ, hex('04 0a 05'), Buffer.from('ERROR'), hex('03'), Buffer.from('no!')]),
    /refused the connection: "no!"/
  )
})
