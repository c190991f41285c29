import { spawnSync } from 'node:child_process'
import { existsSync, readFileSync, writeFileSync } from 'node:fs'
import { dirname, join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { createFromBuffer } from '@dprint/formatter'
import typescript from '@dprint/typescript'

// npm run format [-- --check]: dprint for TypeScript and JavaScript, clang-format for C++ and CUDA.
// Formats every file that git tracks, and untracked files that it does not ignore. With --check it writes nothing and
// exits with 1 when a file is not formatted.

const CLANG_FORMAT = 14
const TYPESCRIPT = {
  semiColons: 'asi',
  quoteStyle: 'preferSingle',
  quoteProps: 'preserve',
  trailingCommas: 'never',
  useBraces: 'whenNotSingleLine',
  bracePosition: 'sameLine',
  nextControlFlowPosition: 'sameLine',
  operatorPosition: 'sameLine',
  'conditionalExpression.operatorPosition': 'nextLine',
  'memberExpression.linePerExpression': true,
  'functionDeclaration.spaceBeforeParentheses': true,
  'functionExpression.spaceBeforeParentheses': true,
  'functionExpression.spaceAfterFunctionKeyword': true,
  'method.spaceBeforeParentheses': true,
  'constructor.spaceBeforeParentheses': true,
  'getAccessor.spaceBeforeParentheses': true,
  'setAccessor.spaceBeforeParentheses': true,
  'arrowFunction.useParentheses': 'maintain',
  'typeLiteral.separatorKind.singleLine': 'comma',
  'module.sortImportDeclarations': 'maintain',
  'module.sortExportDeclarations': 'maintain',
  'importDeclaration.sortNamedImports': 'maintain',
  'exportDeclaration.sortNamedExports': 'maintain'
}

process.chdir(join(dirname(fileURLToPath(import.meta.url)), '..'))
const check = process.argv.includes('--check')
const { status: listed, stdout } = spawnSync('git', ['ls-files', '-z', '-co', '--exclude-standard'], {
  encoding: 'utf8'
})
if (listed !== 0) fail('this is not a git checkout')
// git still lists files that are deleted only in the work tree.
const files = stdout.split('\0').filter(file => file !== '' && existsSync(file))
const outcomes = [formatTypeScript(), formatCpp()]
process.exit(outcomes.every(Boolean) ? 0 : 1)

function formatTypeScript () {
  const formatter = createFromBuffer(readFileSync(typescript.getPath()))
  formatter.setConfig({ lineWidth: 120, indentWidth: 2, useTabs: false }, TYPESCRIPT)
  const problems = formatter.getConfigDiagnostics()
  if (problems.length > 0) fail(problems.map(({ propertyName, message }) => `${propertyName}: ${message}`).join('\n'))
  const changed = files.filter(file => /\.[jt]s$/.test(file)).filter(file => {
    const fileText = readFileSync(file, 'utf8')
    const text = format(formatter, file, fileText)
    if (text !== fileText && !check) writeFileSync(file, text)
    return text !== fileText
  })
  for (const file of changed) console.log(`${file} ${check ? 'is not formatted: run "npm run format"' : 'formatted'}`)
  return !check || changed.length === 0
}

/** dprint's second pass may move what its first one wrapped. */
function format (formatter, filePath, fileText, passes = 4) {
  const text = formatter.formatText({ filePath, fileText })
  return text === fileText || passes === 1 ? text : format(formatter, filePath, text, passes - 1)
}

function formatCpp () {
  const command = findClangFormat()
  const sources = files.filter(file => /^native\/.*\.(cc|h|cu|cuh)$/.test(file))
  const { status } = spawnSync(command, [...check ? ['--dry-run', '-Werror'] : ['-i'], ...sources], {
    stdio: 'inherit'
  })
  return status === 0
}

/** Other major versions format differently. */
function findClangFormat () {
  const found = [`clang-format-${CLANG_FORMAT}`, 'clang-format'].find(command => {
    const { status, stdout } = spawnSync(command, ['--version'], { encoding: 'utf8' })
    return status === 0 && stdout.includes(`version ${CLANG_FORMAT}.`)
  })
  return found ?? fail(`clang-format ${CLANG_FORMAT} is not installed: apt-get install -y clang-format-${CLANG_FORMAT}`)
}

function fail (message) {
  console.error(`npm run format: ${message}`)
  process.exit(1)
}
