import { RefitError } from '../../errors.ts'

// Every error of the reader names the byte of the opcode at fault.

export function malformed (message: string, at: number): RefitError {
  return new RefitError('PICKLE_MALFORMED', `bad pickle at byte ${at}: ${message}`)
}

export function refused (message: string, at: number): RefitError {
  return new RefitError('PICKLE_REFUSED', `refused pickle at byte ${at}: ${message}`)
}

export function limited (message: string, at: number): RefitError {
  return new RefitError('PICKLE_LIMIT', `pickle too big at byte ${at}: ${message}`)
}
