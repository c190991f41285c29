import t from 'tap'
import { parseAdapters } from '../../src/cli/parse-adapters.ts'

t.test('adapters of the command line are pairs, folders and JSON of both servers', async t => {
  t.same(parseAdapters(['a=/x/a', './b', '{"lora_name": "c", "lora_path": "/x=1/c", "pinned": true}'], '/home/me'), [
    { name: 'a', path: '/x/a', pinned: false },
    { name: './b', path: '/home/me/b', pinned: false },
    { name: 'c', path: '/x=1/c', pinned: true }
  ])
  t.same(parseAdapters(['{"name": "d", "path": "d", "base_model_name": "m"}'], '/home/me'), [
    { name: 'd', path: '/home/me/d', pinned: false }
  ])
  t.same(parseAdapters([]), [])
})

t.test('texts that name no adapter, and names given twice, are refused', async t => {
  for (
    const [texts, message] of [
      [['=x'], /expected NAME=FOLDER, got "=x"/],
      [['a='], /expected NAME=FOLDER/],
      [['{"lora_name": 3}'], /expected \{"lora_name"/],
      [['{'], /is no JSON/],
      [['a=x', 'a=y'], /the name "a" is given twice/]
    ] as const
  ) t.throws(() => parseAdapters(texts), { code: 'CONFIG', param: '--lora-paths', message })
})
