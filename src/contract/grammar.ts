// A grammar that the generated tokens of a request follow. The texts are as in the request; the engine compiles them.

/** The language of the generated text. */
export type Language =
  /** Any JSON object. */
  | { kind: 'json_object' }
  /** JSON that a schema accepts; `schema` is JSON text. `compact`: white space only after commas and colons. */
  | { kind: 'json_schema', schema: string, compact?: boolean }
  /** The whole text matches the pattern. */
  | { kind: 'regex', pattern: string }
  /** GBNF: rules `name ::= body`; the text follows the rule `root`. */
  | { kind: 'ebnf', grammar: string }
  /** One of these texts. */
  | { kind: 'choice', choices: readonly string[] }
  /** JSON text in one of xgrammar's forms: `{"format": {...}}`, or `{"structures": [...], "triggers": [...]}`. */
  | { kind: 'structural_tag', tag: string }

/**
 * `after`: the grammar begins after this token id, or this text, has been generated: the end of a model's reasoning,
 * such as `</think>`. Tokens before it are free. Absent: it begins with the first generated token.
 *
 * `opening`: the output decides. If its first token has this text, such as `<think>`, the grammar begins after `after`,
 * else with the first token.
 */
export type Grammar = Language & { after?: number | string, opening?: string }
