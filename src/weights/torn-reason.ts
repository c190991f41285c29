const NAMED = 3

/** Why weights may not be used, naming at most three of the torn tensors, and what to do about it. For people and for logs. */
export function tornReason ({ tensors, reason }: { tensors: readonly string[], reason: string }): string {
  const more = tensors.length > NAMED ? ` and ${tensors.length - NAMED} more` : ''
  return `weights are torn (${reason}): ${tensors.slice(0, NAMED).join(', ')}${more}; write them again with any weight update`
}
