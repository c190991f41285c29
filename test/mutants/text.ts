import type { Mutant } from './mutant.ts'

export const text: readonly Mutant[] = [
  {
    why: 'bytes of an unfinished character are lost',
    file: 'src/text/detokenizer.ts',
    before: 'this.#waiting = bytes.subarray(complete)',
    after: 'this.#waiting = bytes.subarray(bytes.length)',
    tests: ['test/text/detokenizer.test.ts']
  },
  {
    why: "SentencePiece's first space is removed from every word",
    file: 'src/text/detokenizer.ts',
    before: `        this.#stripsLeft--
      } else {
        this.#stripsLeft = 0`,
    after: `        this.#stripsLeft--
      } else {
        this.#stripsLeft = 1`,
    tests: ['test/text/detokenizer.test.ts']
  },
  {
    why: 'the first space is removed from a continued text',
    file: 'src/text/detokenizer.ts',
    before: 'this.#stripsLeft = continues ? 0 : table.strip?.count ?? 0',
    after: 'this.#stripsLeft = table.strip?.count ?? 0',
    tests: ['test/text/detokenizer.test.ts']
  },
  {
    why: "a byte of GPT-2's alphabet is shifted by one",
    file: 'src/text/byte-form.ts',
    before: '(byte >= 0xa1 && byte !== 0xad)',
    after: 'byte >= 0xa1',
    tests: ['test/text/byte-form.test.ts']
  },
  {
    why: 'an added token is read as bytes',
    file: 'src/text/byte-form.ts',
    before: `  if (added) return Buffer.from(token, 'utf8')
`,
    after: '',
    tests: ['test/text/byte-form.test.ts', 'test/text/detokenizer.test.ts', 'test/text/tokenizer.test.ts']
  },
  {
    why: 'broken text is held for ever',
    file: 'src/text/window-detokenizer.ts',
    before: "text.endsWith('\\ufffd') && this.#window.length - this.#given < MOST_HELD",
    after: "text.endsWith('\\ufffd')",
    tests: ['test/text/window-detokenizer.test.ts']
  },
  {
    why: 'a marker that is cut between pieces is shown',
    file: 'src/text/held-text.ts',
    before: 'length > held; length--) {',
    after: 'length > held + 1; length--) {',
    tests: ['test/text/reasoning/formats.test.ts', 'test/text/tools/formats.test.ts']
  },
  {
    why: 'white space before a call is part of the text',
    file: 'src/text/tools/tool-parser.ts',
    before: `        this.#space = ''
        this.#last = 'call'`,
    after: "        this.#last = 'call'",
    tests: ['test/text/tools/formats.test.ts']
  },
  {
    why: 'a malformed block is lost',
    file: 'src/text/tools/tool-parser.ts',
    before: `      this.#text(this.#opening, pieces)
`,
    after: '',
    tests: ['test/text/tools/formats.test.ts']
  },
  {
    why: 'a brace in a text of JSON ends a call',
    file: 'src/text/tools/json-text.ts',
    before: `else if (this.#inString) this.#escaped = code === 0x5c
`,
    after: `else if (this.#inString && code === 0x5c) this.#escaped = true
`,
    tests: ['test/text/tools/formats.test.ts']
  },
  {
    why: 'an escaped quote ends a text of JSON',
    file: 'src/text/tools/json-text.ts',
    before: 'if (this.#escaped) this.#escaped = false',
    after: 'if (this.#escaped && code !== 0x22) this.#escaped = false',
    tests: ['test/text/tools/formats.test.ts']
  },
  {
    why: 'reasoning that the prompt has opened is content',
    file: 'src/text/reasoning/think-tags.ts',
    before: "this.#state = tagged || this.#inside ? 'reasoning' : 'content'",
    after: "this.#state = tagged ? 'reasoning' : 'content'",
    tests: ['test/text/reasoning/formats.test.ts']
  }
]
