import fc from 'fast-check'
import t from 'tap'
import { JsonBody } from '../../src/gateway/json-body.ts'
import type { Pieces } from '../../src/gateway/json-body.ts'

const text = (value: unknown, space = ''): JsonBody => new JsonBody(Buffer.from(JSON.stringify(value, null, space)))

const join = (pieces: Pieces): string => String(Buffer.concat(pieces))

t.test('a search finds the same values as JSON.parse, in any spelling', async t => {
  fc.assert(
    fc.property(
      fc.dictionary(fc.string(), fc.jsonValue({ maxDepth: 3 }), { noNullPrototype: true }),
      fc.constantFrom('', ' ', '\n\t', '  '),
      (value, space) => {
        const written = JSON.stringify(value, null, space)
        const body = new JsonBody(Buffer.from(` ${written}\n`))
        const read = JSON.parse(written) as Record<string, unknown>
        t.same(body.get(), read)
        for (const [name, member] of Object.entries(read)) {
          if (JSON.stringify(body.get(name)) !== JSON.stringify(member)) t.fail(`${JSON.stringify(name)} of ${written}`)
          if (body.has(name) !== (member !== null)) t.fail(`has ${JSON.stringify(name)} of ${written}`)
          if (Array.isArray(member)) {
            t.equal(body.count(name), member.length)
            for (const [i, element] of member.entries()) t.same(body.get(name, i), element)
          } else t.equal(body.count(name), undefined)
        }
      }
    ),
    { numRuns: 200 }
  )
})

t.test('an edit changes its place and no other byte', async t => {
  fc.assert(
    fc.property(fc.jsonValue(), fc.array(fc.string()), fc.integer(), (other, list, number) => {
      const value = { other, 'a "b"\\': { offset: 1, list }, z: other }
      const edited = text(value).with([{ at: ['a "b"\\', 'list'], value: JSON.stringify([number]) }, {
        at: ['a "b"\\', 'offset'],
        value: String(number)
      }])
      t.equal(join(edited), JSON.stringify({ other, 'a "b"\\': { offset: number, list: [number] }, z: other }))
      t.equal(
        JSON.stringify(JSON.parse(join(text(value, ' ').withMember('id', '"x"')!))),
        JSON.stringify({ id: 'x', ...value })
      )
    }),
    { numRuns: 100 }
  )
  t.equal(join(text({}).withMember('id', '1')!), '{"id":1}')
  t.equal(text([1]).withMember('id', '1'), null)
  t.equal(join(text({ a: ['x', 'y"]', { b: 1 }, [2]] }).slice(['a'], 1, 2)), '["y\\"]",{"b":1}]')
  t.equal(join(text({ a: [] }).slice(['a'], 0, 1)), '[]')
})

t.test('a body that is no JSON has no fields', async t => {
  fc.assert(
    fc.property(
      fc.string({
        unit: fc.constantFrom('{', '}', '[', ']', '"', 'a', ':', ',', '\\', '1', ' ', 'null'),
        maxLength: 30
      }),
      written => {
        const body = new JsonBody(Buffer.from(written))
        let read: any
        try {
          read = JSON.parse(written)
        } catch {
          read = undefined
        }
        const found = body.get('a')
        if (read !== undefined) t.same(found, read?.a)
        body.count('a')
        body.has('a', 0)
      }
    ),
    { numRuns: 3000 }
  )
  for (
    const written of [
      '',
      '{',
      '{"a"',
      '{"a":',
      '{"a":1',
      '{"a" 1}',
      '{"a":1 "b":2}',
      '[',
      '"',
      'null',
      '{"a":"\\"}',
      '{"a":}',
      '{,}'
    ]
  ) t.equal(new JsonBody(Buffer.from(written)).get('a'), undefined, written)
  t.equal(new JsonBody(Buffer.from('{"a":1,"a":2}')).get('a'), 2, 'the last of equal names counts')
  t.equal(new JsonBody(Buffer.from('{"\\u0061":3}')).get('a'), 3)
})

t.test('megabytes of handles are skipped, and deep nesting uses no stack', async t => {
  const handles = Buffer.alloc(64 << 20, 'A')
  const body = new JsonBody(
    Buffer.concat([
      Buffer.from('{"handles":["'),
      handles,
      Buffer.from('","b"],"deep":'),
      Buffer.alloc(1 << 20, '['),
      Buffer.alloc(1 << 20, ']'),
      Buffer.from(',"flush":true}')
    ])
  )
  t.equal(body.count('handles'), 2)
  t.equal(body.get('flush'), true)
  t.equal(join(body.slice(['handles'], 0, 1)).length, handles.length + 4)
})

t.test('objects and lists of more members than any that the gateway reads have none', async t => {
  const [most, more] = [65_536, 65_537].map(length => {
    return text({ list: Array(length - 1).fill(0).concat(7), object: { ...Array(length).fill(0) } })
  })
  t.same([most!.count('list'), most!.get('list', 65_535), most!.has('object', '65535')], [65_536, 7, true])
  t.same([more!.count('list'), more!.get('list', 0), more!.get('object', '1')], [0, undefined, undefined])
})
