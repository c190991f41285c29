import UPlot from './uplot.js'
import { byId, milliseconds, setText, short } from './dom.js'
import { quantile } from './model.js'

const HEIGHT = 118
/** Most and fewest seconds of the lines. */
const SPAN = 600
const LEAST = 60

let charts = []
let updates = []
let edges = []

/** Makes the charts in the colours of the theme; called again when it changes. */
export function makeCharts (model) {
  for (const { plot } of charts) plot.destroy()
  const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim()
  const theme = {
    ink: colour('--ink-3'),
    grid: colour('--line-soft'),
    mark: colour('--commit'),
    bad: colour('--failed')
  }
  const line = name => ({ stroke: colour(name), width: 1.5, fill: `${colour(name)}1f`, points: { show: false } })
  const whole = value => Number.isInteger(value) ? String(value) : ''
  charts = [
    lines('chart-rate', [line('--chart-1')], theme, model => [model.rows[0], model.rows[1]], brief),
    lines(
      'chart-requests',
      [line('--chart-1'), { ...line('--chart-2'), fill: undefined }],
      theme,
      model => [model.rows[0], model.rows[2], model.rows[3]],
      whole
    ),
    lines(
      'chart-kv',
      [line('--chart-3')],
      theme,
      model => [model.rows[0], model.rows[4]],
      value => `${Math.round(100 * value)} %`,
      1
    ),
    latency(theme, colour('--chart-1'))
  ]
  if (model.state !== null) drawCharts(model)
}

export function drawCharts (model) {
  updates = model.list
  edges = model.edges
  for (const { plot, read } of charts) {
    const data = read(model)
    if (data !== null) plot.setData(data)
  }
  const counts = model.latency
  const middle = counts === null ? null : quantile(counts, model.edges, 0.5)
  setText(
    byId('latency-note'),
    middle === null
      ? 'none yet'
      : `p50 ${brief(middle)}, p99 ${milliseconds(quantile(counts, model.edges, 0.99))}`
  )
}

export function resizeCharts () {
  for (const { plot, figure } of charts) plot.setSize({ width: widthOf(figure), height: HEIGHT })
}

function lines (id, series, theme, read, text, top) {
  const figure = byId(id)
  const options = {
    width: widthOf(figure),
    height: HEIGHT,
    legend: { show: false },
    padding: [8, 6, 0, 0],
    cursor: { y: false, drag: { x: false, y: false }, points: { show: false } },
    scales: {
      x: { time: true, range: plot => rangeOf(plot.data[0]) },
      y: { range: (_plot, _low, high) => [0, Math.max(top ?? 1, (high ?? 1) * (top === undefined ? 1.1 : 1))] }
    },
    axes: [
      axis(theme, 18, { space: 70, values: (plot, ticks) => ticks.map(second => timeOf(second, plot.scales.x)) }),
      axis(theme, 38, {
        space: 34,
        values: (_plot, ticks) => ticks.map(text)
      })
    ],
    series: [{}, ...series],
    hooks: { draw: [plot => mark(plot, theme)] }
  }
  return { figure, read, plot: new UPlot(options, series.length === 1 ? [[], []] : [[], [], []], figure) }
}

function latency (theme, stroke) {
  const figure = byId('chart-latency')
  const plot = new UPlot(
    {
      width: widthOf(figure),
      height: HEIGHT,
      legend: { show: false },
      padding: [8, 6, 0, 0],
      cursor: { show: false },
      scales: { x: { time: false }, y: { range: (_plot, _low, high) => [0, Math.max(1, (high ?? 1) * 1.1)] } },
      axes: [
        axis(theme, 18, {
          space: 46,
          values: (_plot, ticks) => ticks.map(tick => edges[tick] === undefined ? '' : edgeText(edges[tick]))
        }),
        axis(theme, 38, { space: 34, values: (_plot, ticks) => ticks.map(brief) })
      ],
      series: [{}, {
        stroke,
        fill: `${stroke}66`,
        width: 1,
        paths: UPlot.paths.bars({ size: [0.86] }),
        points: { show: false }
      }]
    },
    [[], []],
    figure
  )
  return { figure, plot, read: ({ latency }) => latency === null ? null : around(latency) }
}

function edgeText (ms) {
  return ms >= 1000 ? `${(ms / 1000).toFixed(0)} s` : `${ms < 10 ? ms.toFixed(1) : ms.toFixed(0)} ms`
}

/** The buckets that hold something, and one more on each side. */
function around (counts) {
  const used = counts.flatMap((value, i) => value > 0 ? [i] : [])
  const from = Math.max(0, (used[0] ?? 12) - 3)
  const to = Math.min(counts.length - 1, (used.at(-1) ?? 24) + 3)
  const places = Array.from({ length: to - from + 1 }, (_, i) => from + i)
  return [places, places.map(i => counts[i])]
}

/** A thin line where an update began, and its stall. */
function mark ({ ctx, bbox, valToPos }, theme) {
  ctx.save()
  ctx.globalAlpha = 0.55
  for (const { started_at: at, outcome } of updates) {
    const x = valToPos(at, 'x', true)
    if (x < bbox.left || x > bbox.left + bbox.width) continue
    ctx.fillStyle = outcome === 'refused' || outcome === 'torn' ? theme.bad : theme.mark
    ctx.fillRect(Math.round(x), bbox.top, Math.max(1, Math.round(devicePixelRatio)), bbox.height)
  }
  ctx.restore()
}

function axis (theme, size, more) {
  return {
    stroke: theme.ink,
    size,
    gap: 3,
    font: '11px system-ui, sans-serif',
    grid: { stroke: theme.grid, width: 1 },
    ticks: { show: false },
    ...more
  }
}

/** All readings, between one and ten minutes. */
function rangeOf (seconds) {
  const end = seconds.at(-1) ?? Date.now() / 1000
  return [end - Math.min(SPAN, Math.max(LEAST, end - (seconds[0] ?? end))), end]
}

/** Without seconds once there are minutes; none where it would touch the other axis. */
function timeOf (second, { min, max }) {
  if ((second - min) / (max - min) < 0.12) return ''
  return new Date(second * 1000).toLocaleTimeString('en-GB').slice(0, max - min > 240 ? 5 : 8)
}

function brief (value) {
  return value >= 10_000 ? `${Math.round(value / 1000)}k` : short(value).replace(/\.0+$/, '')
}

function widthOf (figure) {
  const { paddingLeft, paddingRight } = getComputedStyle(figure)
  return Math.max(120, figure.clientWidth - parseFloat(paddingLeft) - parseFloat(paddingRight))
}
