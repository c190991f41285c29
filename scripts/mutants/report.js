const COLUMNS = ['caught', 'survived', 'skipped', 'error']

/** One line for a mutant. */
export function report ({ area, file, why, outcome, note, seconds }) {
  const shown = outcome === 'caught' ? 'caught  ' : outcome.toUpperCase()
  return `${shown} ${area}: ${why} (${file}; ${note}; ${seconds.toFixed(1)} s)`
}

/** The mutants of each area by outcome, then those that need attention. */
export function summary (results, seconds) {
  const lines = ['', row('area', 'mutants', ...COLUMNS)]
  const areas = [...new Set(results.map(({ area }) => area))]
  for (const area of [...areas, 'all']) {
    const own = results.filter(result => area === 'all' || result.area === area)
    const counts = COLUMNS.map(column => own.filter(({ outcome }) => outcome === column).length)
    lines.push(row(area, own.length, ...counts))
  }
  const list = (title, outcome) => {
    const own = results.filter(result => result.outcome === outcome)
    if (own.length > 0) lines.push('', `${title}:`, ...own.map(result => `  ${report(result)}`))
  }
  list('No test noticed these bugs', 'survived')
  list('These were not judged', 'skipped')
  list('These rows of the table are wrong', 'error')
  const judged = results.filter(({ outcome }) => outcome !== 'skipped')
  const caught = judged.filter(({ outcome }) => outcome === 'caught').length
  const percent = judged.length === 0 ? 100 : 100 * caught / judged.length
  lines.push(
    '',
    `${caught} of ${judged.length} mutants are caught (${percent.toFixed(1)} %) in ${seconds.toFixed(0)} s`
  )
  return lines.join('\n')
}

function row (name, ...cells) {
  return name.padEnd(16) + cells.map(cell => String(cell).padStart(10)).join('')
}
