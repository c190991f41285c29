/** Whether `/weights_checker` with this query does more than report checksums. */
export function changesWeightsCheck ({ action }: Readonly<Record<string, unknown>>): boolean {
  return action !== undefined && action !== 'checksum'
}
