// Each version gets one of eight colours. A new version takes the colour that was taken longest ago.

const COLOURS = 8
const taken = new Map()

export function colourOf (version) {
  let colour = taken.get(version)
  if (colour === undefined) {
    if (taken.size < COLOURS) colour = taken.size
    else {
      const [oldest, free] = taken.entries().next().value
      taken.delete(oldest)
      colour = free
    }
  } else taken.delete(version)
  taken.set(version, colour)
  return String(colour)
}
