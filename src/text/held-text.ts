/** Length of the longest end of `text` that may be the beginning of a marker. */
export function heldLength (text: string, markers: readonly string[]): number {
  let held = 0
  for (const marker of markers) {
    for (let length = Math.min(text.length, marker.length - 1); length > held; length--) {
      if (marker.startsWith(text.slice(text.length - length))) held = length
    }
  }
  return held
}
