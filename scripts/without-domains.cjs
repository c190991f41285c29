// node --require: tap follows each promise to find the test that an uncaught error belongs to, which takes a tenth of
// the time of tests. With this it does not: such an error ends the process, and the last test in its output is the one.
const hooks = require('node:async_hooks')
const { syncBuiltinESMExports } = require('node:module')

const { createHook } = hooks
const inert = { enable: () => inert, disable: () => inert }
hooks.createHook = callbacks => new Error().stack.includes('async-hook-domain') ? inert : createHook(callbacks)
syncBuiltinESMExports()
