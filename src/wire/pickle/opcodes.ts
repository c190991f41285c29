// Opcodes that Python's unpickler knows and refit does not, with what they would do (pickletools has the whole list). What refit
// reads is the switch in pickle.ts; the binary opcodes of protocols 2 to 5 that data can be written with, less those here.

const TEXT = 'an opcode of protocol 0 or 1'
const OUT_OF_BAND = 'a buffer beside the pickle, which a request cannot carry'
const EXTENSION = 'a number of the copyreg extension registry, which stands for a name'
const PERSISTENT = 'a persistent id, as torch.save writes; send handles (ForkingPickler) or safetensors'

const REFUSED: ReadonlyMap<number, readonly [name: string, reason: string]> = new Map([
  [0x50, ['PERSID', PERSISTENT]],
  [0x51, ['BINPERSID', PERSISTENT]],
  [0x82, ['EXT1', EXTENSION]],
  [0x83, ['EXT2', EXTENSION]],
  [0x84, ['EXT4', EXTENSION]],
  [0x97, ['NEXT_BUFFER', OUT_OF_BAND]],
  [0x98, ['READONLY_BUFFER', OUT_OF_BAND]],
  [0x92, ['NEWOBJ_EX', 'an instance made with keyword arguments, which none of the known classes needs']],
  [0x69, ['INST', TEXT]],
  [0x6f, ['OBJ', TEXT]],
  [0x53, ['STRING', TEXT]],
  [0x54, ['BINSTRING', TEXT]],
  [0x55, ['SHORT_BINSTRING', TEXT]],
  [0x49, ['INT', TEXT]],
  [0x4c, ['LONG', TEXT]],
  [0x46, ['FLOAT', TEXT]],
  [0x56, ['UNICODE', TEXT]],
  [0x64, ['DICT', TEXT]],
  [0x6c, ['LIST', TEXT]],
  [0x32, ['DUP', TEXT]],
  [0x70, ['PUT', TEXT]],
  [0x67, ['GET', TEXT]]
])

/** What stands in the way of an opcode that is not read, in words. */
export function describeOpcode (opcode: number): string {
  const hex = opcode.toString(16).padStart(2, '0')
  const known = REFUSED.get(opcode)
  return known === undefined ? `${hex} is no opcode of pickle` : `opcode ${hex} (${known[0]}) is not read: ${known[1]}`
}
