import t from 'tap'
import assert from 'node:assert/strict'
import fc from 'fast-check'
import { bytesIn, layOutPieces } from '../../src/process-groups/pieces.ts'

t.test('pieces contain every broadcast once, in order, aligned, and none is larger than necessary', async () => {
  await fc.assert(
    fc.asyncProperty(
      fc.array(fc.oneof(fc.nat(5000), fc.constant(0), fc.constant(256))),
      fc.integer({ min: 1, max: 9000 }),
      async (sizes, pieceBytes) => {
        const { offsets, pieces } = layOutPieces(sizes, pieceBytes)
        assert.equal(offsets.length, sizes.length)
        let end = 0
        let next = 0
        for (const piece of pieces) {
          assert.equal(piece.begin, end, 'a piece begins where the one before ended')
          assert.equal(piece.first, next)
          assert.ok(piece.end > piece.first)
          assert.ok(piece.parts.length === 2 * (piece.end - piece.first))
          const sum = sizes.slice(piece.first, piece.end).reduce((a, b) => a + b, 0)
          assert.equal(bytesIn(piece), sum)
          for (let index = piece.first; index < piece.end; index++) {
            const [offset, bytes] = [
              piece.parts[2 * (index - piece.first)]!,
              piece.parts[2 * (index - piece.first) + 1]!
            ]
            assert.equal(bytes, sizes[index])
            assert.equal(offset % 256, 0)
            assert.equal(piece.begin + offset, offsets[index])
            assert.ok(offset + bytes <= piece.length)
            if (index > piece.first) {
              assert.ok(
                offset >= piece.parts[2 * (index - piece.first) - 2]! + sizes[index - 1]!,
                'they do not overlap'
              )
            }
          }
          const last = piece.end - 1
          if (piece.end - piece.first > 1) {
            assert.ok(
              offsets[last]! + sizes[last]! - piece.begin <= pieceBytes,
              'several broadcasts fit'
            )
          }
          next = piece.end
          end = piece.begin + piece.length
        }
        assert.equal(next, sizes.length)
      }
    ),
    { numRuns: 300 }
  )
})

t.test('without broadcasts there are no pieces', async t => {
  t.same(layOutPieces([], 100), { offsets: [], pieces: [] })
})
