import { untilTag } from './tool-format.ts'
import type { Piece, ToolCall, ToolFormat } from './tool-format.ts'

interface Section {
  open: string
  close: string
  callOpen: string
  callClose: string
  /** More markers of a call. */
  markers: readonly string[]
  /** The call between `callOpen` and `callClose`, or null if it is none. */
  readCall: (body: string) => ToolCall | null
}

/** Formats that put calls, each between two markers, into one section. A malformed call is text. */
export function sectionFormat ({ open, close, callOpen, callClose, markers, readCall }: Section): ToolFormat {
  return {
    openings: [open],
    markers: [close, callOpen, callClose, ...markers],
    ending: untilTag(close),
    read: block => {
      const body = block.slice(open.length, block.endsWith(close) ? -close.length : undefined)
      const [before = '', ...parts] = body.split(callOpen)
      const pieces = parts.flatMap((part): Piece[] => {
        const end = part.indexOf(callClose)
        const call = readCall(end < 0 ? part : part.slice(0, end))
        return call === null ? [callOpen + part] : [call, ...end < 0 ? [] : [part.slice(end + callClose.length)]]
      })
      return pieces.some(piece => typeof piece !== 'string') ? [before, ...pieces] : null
    }
  }
}
