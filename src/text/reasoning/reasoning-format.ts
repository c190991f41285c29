/** Text of the model's reasoning, or of the reply after it. */
export interface ReplyPart {
  kind: 'reasoning' | 'content'
  text: string
}

/** The parts of all calls, joined by kind, do not depend on where the reply was cut. */
export interface ReasoningParser {
  push: (text: string) => ReplyPart[]
  /** The reply has ended. */
  finish: () => ReplyPart[]
}

/** The text before a reply. */
export interface ReplyContext {
  /** The rendered prompt. */
  prompt: string
  /** The beginning of the message that the reply continues, or null. */
  continued: string | null
}

/** How a family of models separates its reasoning from its reply. */
export interface ReasoningFormat {
  /** Special tokens among these stay in the text. */
  readonly markers: readonly string[]
  /** Without a context, the reply stands alone. */
  readonly parser: (context: ReplyContext | null) => ReasoningParser
  /** The reasoning that a reply may begin with; null: none. */
  readonly begins: (context: ReplyContext) => ReasoningBounds | null
}

/** The texts around reasoning. `opening`: absent if the reply begins inside. */
export interface ReasoningBounds {
  opening?: string
  after: string
}
