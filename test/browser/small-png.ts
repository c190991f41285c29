import { crc32, deflateSync, inflateSync } from 'node:zlib'

const SIGNATURE = 8
const COLOURS = 256

/**
 * The same picture with a palette of its 256 most frequent colours; other pixels take the nearest of them. Pictures of
 * pages, which have few colours, become a third as large. For 8-bit RGB and RGBA without interlacing, as Chromium
 * writes them.
 */
export function smallPng (png: Buffer): Buffer {
  const { width, height, channels, pixels } = decode(png)
  const counts = new Map<number, number>()
  const colours = new Uint32Array(width * height)
  for (let i = 0; i < colours.length; i++) {
    const at = i * channels
    const colour = (pixels[at]! << 16) | (pixels[at + 1]! << 8) | pixels[at + 2]!
    colours[i] = colour
    counts.set(colour, (counts.get(colour) ?? 0) + 1)
  }
  const palette = [...counts].sort((a, b) => b[1] - a[1]).slice(0, COLOURS).map(([colour]) => colour)
  const places = new Map([...counts.keys()].map(colour => [colour, nearest(palette, colour)]))
  const rows = Buffer.alloc((width + 1) * height)
  for (let i = 0; i < colours.length; i++) {
    rows[Math.floor(i / width) * (width + 1) + 1 + i % width] = places.get(colours[i]!)!
  }
  const head = Buffer.alloc(13)
  head.writeUInt32BE(width, 0)
  head.writeUInt32BE(height, 4)
  // 8 bits, indices into a palette.
  head.set([8, 3, 0, 0, 0], 8)
  return Buffer.concat([
    png.subarray(0, SIGNATURE),
    chunk('IHDR', head),
    chunk('PLTE', Buffer.from(palette.flatMap(colour => [colour >> 16, (colour >> 8) & 255, colour & 255]))),
    chunk('IDAT', deflateSync(rows, { level: 9 })),
    chunk('IEND', Buffer.alloc(0))
  ])
}

function nearest (palette: readonly number[], colour: number): number {
  let best = 0
  let least = Infinity
  for (const [i, other] of palette.entries()) {
    const [r, g, b] = [16, 8, 0].map(shift => ((colour >> shift) & 255) - ((other >> shift) & 255))
    const distance = r! * r! + g! * g! + b! * b!
    if (distance < least) [best, least] = [i, distance]
  }
  return best
}

function decode (png: Buffer): { width: number, height: number, channels: number, pixels: Buffer } {
  const parts: Buffer[] = []
  let head = Buffer.alloc(0)
  for (let at = SIGNATURE; at < png.length;) {
    const length = png.readUInt32BE(at)
    const data = png.subarray(at + 8, at + 8 + length)
    const type = png.toString('latin1', at + 4, at + 8)
    if (type === 'IHDR') head = Buffer.from(data)
    if (type === 'IDAT') parts.push(data)
    at += length + 12
  }
  const [width, height] = [head.readUInt32BE(0), head.readUInt32BE(4)]
  const channels = head[9] === 6 ? 4 : 3
  const raw = inflateSync(Buffer.concat(parts))
  const stride = width * channels
  const pixels = Buffer.alloc(stride * height)
  for (let y = 0; y < height; y++) {
    const filter = raw[y * (stride + 1)]!
    for (let x = 0; x < stride; x++) {
      const left = x < channels ? 0 : pixels[y * stride + x - channels]!
      const up = y === 0 ? 0 : pixels[(y - 1) * stride + x]!
      const corner = x < channels || y === 0 ? 0 : pixels[(y - 1) * stride + x - channels]!
      const guess = [0, left, up, (left + up) >> 1, paeth(left, up, corner)][filter]!
      pixels[y * stride + x] = raw[y * (stride + 1) + 1 + x]! + guess
    }
  }
  return { width, height, channels, pixels }
}

function paeth (left: number, up: number, corner: number): number {
  const guess = left + up - corner
  const [a, b, c] = [Math.abs(guess - left), Math.abs(guess - up), Math.abs(guess - corner)]
  return a <= b && a <= c ? left : b <= c ? up : corner
}

function chunk (type: string, data: Buffer): Buffer {
  const body = Buffer.concat([Buffer.from(type, 'latin1'), data])
  const out = Buffer.alloc(body.length + 8)
  out.writeUInt32BE(data.length, 0)
  body.copy(out, 4)
  out.writeUInt32BE(crc32(body), body.length + 4)
  return out
}
