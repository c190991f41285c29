/** A function that the model may call, as the request declares it. */
export interface ToolFunction {
  name: string
  /** JSON schema of its arguments. */
  parameters?: unknown
}

export interface ToolCall {
  name: string
  /** JSON text. */
  arguments: string
  /** The id that the model wrote, or null. */
  id: string | null
}

/** A call, or text of the reply. */
export type Piece = ToolCall | string

/**
 * How a family of models writes calls: in blocks that begin with a marker. A format knows one block; `ToolParser` finds
 * the blocks in a reply, and cuts a stream where a block may begin.
 */
export interface ToolFormat {
  /** Markers that begin a block. */
  readonly openings: readonly string[]
  /** Markers that begin a block only at the beginning of the reply. */
  readonly openingsAtStart?: readonly string[]
  /** More markers; special tokens among all markers stay in the text. */
  readonly markers?: readonly string[]
  /**
   * Makes a function that is called with the text from the opening on, each time with more of it, and returns the
   * length of the block, or -1 while its end is not there.
   */
  readonly ending: (opening: string) => (text: string) => number
  /**
   * The calls of a block, with text between them that is no call; null if the block is malformed. A block that the end
   * of the reply cuts off is read, too, and is malformed unless its calls are whole.
   */
  readonly read: (block: string, tools: readonly ToolFunction[]) => Piece[] | null
  /** Makes the id of a call without one (default `call_` and 24 hex digits). */
  readonly newId?: () => string
}

/** The end of a block is the first of a tag for which `inside` is false: the tag may be text of an argument. */
export function untilTag (tag: string, inside: () => (text: string, at: number) => boolean = () => () => false) {
  return () => {
    const isInside = inside()
    let from = 0
    return (text: string): number => {
      for (let at = text.indexOf(tag, from); at >= 0; at = text.indexOf(tag, from)) {
        if (!isInside(text, at)) return at + tag.length
        from = at + tag.length
      }
      from = Math.max(from, text.length - tag.length + 1)
      return -1
    }
  }
}

/** The schema of an argument; undefined if the function or the argument is not declared. */
export function argumentSchema (tools: readonly ToolFunction[], name: string, argument: string): unknown {
  const schema = tools.find(tool => tool.name === name)?.parameters as { properties?: unknown } | null | undefined
  const properties = schema?.properties as Record<string, unknown> | null | undefined
  return properties != null && Object.hasOwn(properties, argument) ? properties[argument] : undefined
}
