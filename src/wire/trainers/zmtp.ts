import { RefitError } from '../../errors.ts'

// ZMTP 3.1, the wire protocol of ZeroMQ, with the NULL mechanism: https://rfc.zeromq.org/spec/37/ (3.0:
// https://rfc.zeromq.org/spec/23/). A peer sends a greeting of 64 bytes, then a READY command with its socket type,
// then messages of one or more frames.

const GREETING_BYTES = 64
const MECHANISM_AT = 12
const MECHANISM_BYTES = 20
const MORE = 1
const LONG = 2
const COMMAND = 4
const RESERVED = 0xf8
/** The most bytes of one frame, and of all frames of a message together. */
const MAX_BYTES = 64 * 2 ** 20
const MAX_FRAMES = 16

export type SocketType = 'REP' | 'REQ'

/** One thing that a peer has sent. `ready` comes first, once. */
export type ZmtpEvent =
  | { type: 'ready', socketType: string }
  | { type: 'message', frames: Buffer[] }
  /** A heartbeat. The reply is a PONG with the same context. */
  | { type: 'ping', context: Buffer }

/** The first 64 bytes of a connection, from either side. */
export function zmtpGreeting (): Buffer {
  const bytes = Buffer.alloc(GREETING_BYTES)
  bytes[0] = 0xff
  bytes[9] = 0x7f
  bytes[10] = 3
  bytes[11] = 1
  bytes.write('NULL', MECHANISM_AT, 'latin1')
  return bytes
}

/** The handshake of the NULL mechanism. */
export function zmtpReady (socketType: SocketType): Buffer {
  return command('READY', Buffer.concat([property('Socket-Type', socketType), property('Identity', '')]))
}

export function zmtpPong (context: Uint8Array): Buffer {
  return command('PONG', context)
}

export function zmtpMessage (frames: readonly Uint8Array[]): Buffer {
  return Buffer.concat(
    frames.flatMap((frame, index) => [header(index + 1 < frames.length ? MORE : 0, frame.byteLength), frame])
  )
}

/** Reads the bytes of a peer, in pieces of any size. Throws ZMQ_PROTOCOL, after which it cannot be used. */
export class ZmtpReader {
  #chunks: Buffer[] = []
  #have = 0
  #greeted = false
  #ready = false
  #frames: Buffer[] = []
  #frameBytes = 0

  /** Returns the events that these bytes complete. */
  push (chunk: Buffer): ZmtpEvent[] {
    this.#chunks.push(chunk)
    this.#have += chunk.length
    const events: ZmtpEvent[] = []
    while (this.#greeted ? this.#frame(events) : this.#greeting());
    return events
  }

  /** False if more bytes are needed. */
  #greeting (): boolean {
    const bytes = this.#peek(Math.min(this.#have, GREETING_BYTES))
    // Checked as early as possible: a peer of another protocol may never send 64 bytes.
    if (bytes.length > 0 && bytes[0] !== 0xff) throw protocol('the peer does not speak ZMTP')
    if (bytes.length > 9 && (bytes[9]! & 1) === 0) throw protocol('its signature is not that of ZMTP')
    if (bytes.length > 10 && bytes[10]! < 3) {
      throw protocol(`it speaks ZMTP ${bytes[10]}, and 3 is the oldest that refit speaks`)
    }
    if (bytes.length < GREETING_BYTES) return false
    const mechanism = bytes.toString('latin1', MECHANISM_AT, MECHANISM_AT + MECHANISM_BYTES).replace(/\0+$/, '')
    if (mechanism !== 'NULL') {
      throw protocol(`its security mechanism is ${JSON.stringify(mechanism)}, and refit speaks NULL alone`)
    }
    this.#take(GREETING_BYTES)
    this.#greeted = true
    return true
  }

  #frame (events: ZmtpEvent[]): boolean {
    if (this.#have < 2) return false
    const flags = this.#peek(1)[0]!
    if ((flags & RESERVED) !== 0) throw protocol(`a frame with flags ${flags}`)
    const headerBytes = (flags & LONG) === 0 ? 2 : 9
    if (this.#have < headerBytes) return false
    const head = this.#peek(headerBytes)
    const length = headerBytes === 2 ? head[1]! : head.readUInt32BE(1) * 2 ** 32 + head.readUInt32BE(5)
    if (length > MAX_BYTES - this.#frameBytes) throw protocol(`a message of more than ${MAX_BYTES} bytes`)
    if (this.#have < headerBytes + length) return false
    this.#take(headerBytes)
    const body = this.#take(length)
    if ((flags & COMMAND) !== 0) this.#command(body, events)
    else this.#message(body, (flags & MORE) !== 0, events)
    return true
  }

  #message (body: Buffer, more: boolean, events: ZmtpEvent[]): void {
    if (!this.#ready) throw protocol('a message before its READY')
    if (this.#frames.push(body) > MAX_FRAMES) throw protocol(`a message of more than ${MAX_FRAMES} frames`)
    this.#frameBytes += body.length
    if (more) return
    events.push({ type: 'message', frames: this.#frames })
    this.#frames = []
    this.#frameBytes = 0
  }

  #command (body: Buffer, events: ZmtpEvent[]): void {
    const length = body[0] ?? 0
    const name = body.toString('latin1', 1, 1 + length)
    const rest = body.subarray(1 + length)
    if (name === 'ERROR') {
      throw protocol(`it refused the connection: ${JSON.stringify(rest.toString('latin1', 1, 1 + (rest[0] ?? 0)))}`)
    }
    if (name === 'READY' && !this.#ready) {
      this.#ready = true
      events.push({ type: 'ready', socketType: propertiesOf(rest).get('socket-type') ?? '' })
    } else if (!this.#ready) throw protocol('a command before its READY')
    // The context follows two bytes with the time that the peer waits.
    else if (name === 'PING') events.push({ type: 'ping', context: rest.subarray(2, 18) })
  }

  /** The first bytes. The caller has checked that there are enough. */
  #peek (count: number): Buffer {
    const first = this.#chunks[0]
    if (first === undefined) return Buffer.alloc(0)
    if (first.length < count) this.#chunks = [Buffer.concat(this.#chunks)]
    return this.#chunks[0]!.subarray(0, count)
  }

  #take (count: number): Buffer {
    const bytes = this.#peek(count)
    this.#have -= count
    const rest = this.#chunks[0]?.subarray(count)
    if (rest === undefined || rest.length === 0) this.#chunks.shift()
    else this.#chunks[0] = rest
    return bytes
  }
}

function command (name: string, rest: Uint8Array): Buffer {
  const body = Buffer.concat([Buffer.of(name.length), Buffer.from(name, 'latin1'), rest])
  return Buffer.concat([header(COMMAND, body.length), body])
}

function header (flags: number, length: number): Buffer {
  if (length < 256) return Buffer.of(flags, length)
  const bytes = Buffer.alloc(9)
  bytes[0] = flags | LONG
  bytes.writeBigUInt64BE(BigInt(length), 1)
  return bytes
}

function property (name: string, value: string): Buffer {
  const bytes = Buffer.alloc(1 + name.length + 4 + value.length)
  bytes[0] = name.length
  bytes.write(name, 1, 'latin1')
  bytes.writeUInt32BE(value.length, 1 + name.length)
  bytes.write(value, 5 + name.length, 'latin1')
  return bytes
}

/** Names are case-insensitive, so they are stored in lower case. */
function propertiesOf (bytes: Buffer): Map<string, string> {
  const found = new Map<string, string>()
  for (let at = 0; at < bytes.length;) {
    const nameEnd = at + 1 + bytes[at]!
    if (nameEnd + 4 > bytes.length) throw protocol('a READY that is cut off')
    const end = nameEnd + 4 + bytes.readUInt32BE(nameEnd)
    if (end > bytes.length) throw protocol('a READY that is cut off')
    found.set(bytes.toString('latin1', at + 1, nameEnd).toLowerCase(), bytes.toString('latin1', nameEnd + 4, end))
    at = end
  }
  return found
}

function protocol (message: string): RefitError {
  return new RefitError('ZMQ_PROTOCOL', message)
}
