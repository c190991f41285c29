import t from 'tap'
import { printable } from '../../src/cli/log.ts'

t.test("a client's text forges no line and no escape sequence on a terminal", async t => {
  const msg = 'no route GET /a\r\n[12:00:00] FATAL: forged\u001b[2J\u009b1A\u2028é'
  t.equal(
    printable({ msg }, 'msg'),
    'no route GET /a\\x0d\\x0a[12:00:00] FATAL: forged\\x1b[2J\\x9b1A\\x2028é'
  )
  t.equal(printable({}, 'msg'), '')
})
