/** Sources of guesses of the next tokens: outputs of the same prompt, or none. */
export type Speculative = 'off' | 'siblings'

/** Most guessed tokens of a request in one step, unless set. */
export const DRAFT_TOKENS = 16
