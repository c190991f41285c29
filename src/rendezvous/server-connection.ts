import type { Socket } from 'node:net'
import {
  byteAnswer,
  checkAnswer,
  keysAnswer,
  numberAnswer,
  pingAnswer,
  valueAnswer,
  valuesAnswer
} from '../wire/store/answer.ts'
import { protocolError, STOP_WAITING, STORE_LIMITS, WAIT_CANCELED } from '../wire/store/protocol.ts'
import { PullBuffer, Pulling } from '../wire/store/pull.ts'
import type { StoreRequest } from '../wire/store/request.ts'
import { readHandshake, readRequest } from '../wire/store/request-reader.ts'
import type { StoreState } from './server-state.ts'

/** A client that has not sent a TCPStore's handshake is closed after this time. */
const HANDSHAKE_MS = 10_000
/** A client's next requests wait while it has more unread bytes than this. */
const UNREAD_BYTES = 1024 * 1024

/** The cost of a key that a client waits for, in addition to its bytes. */
const KEY_COST = 64

/** Bytes of incomplete requests and of awaited keys, of all connections together. */
export interface Inbox {
  bytes: number
  maxBytes: number
}

/** One client of the server. A request that breaks the protocol or a limit closes the connection, as in torch. */
export class ServerConnection {
  readonly #socket: Socket
  readonly #state: StoreState
  readonly #inbox: Inbox
  readonly #bytes = new PullBuffer()
  #handshake: NodeJS.Timeout | undefined
  #request = new Pulling(readHandshake())
  /** Bytes that this connection has in the inbox. */
  #held = 0
  #endWait: (() => void) | undefined

  constructor (socket: Socket, state: StoreState, inbox: Inbox) {
    this.#socket = socket
    this.#state = state
    this.#inbox = inbox
  }

  /** Serves the client until it disconnects. */
  serve (): void {
    this.#handshake = setTimeout(() => {
      this.#socket.destroy()
    }, HANDSHAKE_MS)
    this
      .#socket
      .on('data', chunk => {
        this.#take(chunk)
      })
      .on('drain', () => {
        this.#run()
      })
      .on('error', () => {})
      .on('close', () => {
        clearTimeout(this.#handshake)
        this.#endWait?.()
        this.#hold(0)
      })
  }

  #take (chunk: Buffer): void {
    this.#bytes.push(chunk)
    this.#hold(this.#held + chunk.length)
    if (this.#inbox.bytes > this.#inbox.maxBytes) this.#socket.destroy()
    else this.#run()
  }

  #run (): void {
    try {
      while (!this.#socket.destroyed) {
        if (this.#socket.writableLength > UNREAD_BYTES) {
          this.#socket.pause()
          return
        }
        const request = this.#request.run(this.#bytes)
        if (request === undefined) break
        this.#request = new Pulling(readRequest())
        this.#hold(this.#bytes.length)
        const answer = this.#answer(request.value)
        if (answer !== undefined) this.#socket.write(answer)
      }
      this.#socket.resume()
    } catch {
      this.#socket.destroy()
    }
  }

  #answer (request: StoreRequest): Buffer | undefined {
    const state = this.#state
    if (this.#endWait !== undefined && request.op !== 'CANCEL_WAIT') {
      throw protocolError(`${request.op} from a client that waits`)
    }
    switch (request.op) {
      case 'VALIDATE':
        clearTimeout(this.#handshake)
        return undefined
      case 'PING':
        return pingAnswer(request.nonce)
      case 'SET':
        state.set(request.key, request.value)
        return undefined
      case 'APPEND':
        state.append(request.key, request.value)
        return undefined
      case 'MULTI_SET':
        for (const [key, value] of request.pairs) state.set(key, value)
        return undefined
      case 'ADD':
        return numberAnswer(state.add(request.key, request.delta))
      case 'COMPARE_SET':
        return valueAnswer(state.compareSet(request.key, request.expected, request.desired))
      case 'GET':
        return valueAnswer(state.get(request.key))
      case 'MULTI_GET':
        return this.#values(request.keys)
      case 'CHECK':
        return checkAnswer(state.has(request.keys))
      case 'DELETE_KEY':
        return numberAnswer(state.delete(request.key) ? 1 : 0)
      case 'NUM_KEYS':
        return numberAnswer(state.size)
      case 'LIST_KEYS':
        return keysAnswer(state.keys)
      case 'CANCEL_WAIT':
        this.#endWait?.()
        this.#endWait = undefined
        return byteAnswer(WAIT_CANCELED)
      case 'WAIT':
        return this.#wait(request.keys)
    }
  }

  /** Refuses a reply that is larger than a client would accept: a request may name one key many times. */
  #values (keys: readonly string[]): Buffer {
    const values = keys.map(key => this.#state.get(key))
    const bytes = values.reduce((sum, value) => sum + value.length, 0)
    if (bytes > STORE_LIMITS.messageBytes) {
      throw protocolError(`MULTI_GET of ${bytes} bytes: at most ${STORE_LIMITS.messageBytes} are given`)
    }
    return valuesAnswer(values)
  }

  #wait (keys: readonly string[]): undefined {
    let done = false
    const end = this.#state.wait(keys, () => {
      done = true
      if (this.#endWait !== undefined) this.#hold(this.#bytes.length)
      this.#endWait = undefined
      this.#socket.write(byteAnswer(STOP_WAITING))
    })
    if (done) return
    this.#endWait = end
    // The server holds the awaited keys as long as the client waits.
    this.#hold(this.#held + keys.reduce((sum, key) => sum + key.length + KEY_COST, 0))
    if (this.#inbox.bytes > this.#inbox.maxBytes) throw protocolError('too many keys are waited for')
  }

  #hold (bytes: number): void {
    this.#inbox.bytes += bytes - this.#held
    this.#held = bytes
  }
}
