import { readFileSync } from 'node:fs'
import { Value } from 'typebox/value'
import { errorMessage, RefitError } from '../errors.ts'
import { Receipt, sealOf } from '../http/samples/receipt.ts'

/** Reads the file of a receipt. Throws CONFIG if it is none, or was changed after the server wrote it. */
export function readReceipt (path: string): Receipt {
  const refuse = (message: string): RefitError => new RefitError('CONFIG', `replay: ${path} ${message}`)
  let value: unknown
  try {
    value = JSON.parse(readFileSync(path, 'utf8'))
  } catch (error) {
    throw refuse(`cannot be read as JSON: ${errorMessage(error)}`)
  }
  const [wrong] = Value.Errors(Receipt, value)
  if (wrong !== undefined) throw refuse(`is no receipt: ${wrong.instancePath || 'it'} ${wrong.message}`)
  const receipt = value as Receipt
  if (sealOf(receipt) !== receipt.seal) throw refuse('was changed after the server wrote it: its seal does not fit')
  return receipt
}
