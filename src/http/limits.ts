/** For bodies of routes that generate or read text. */
export const MAX_BODY_BYTES = 8 * 1024 * 1024

/** For bodies: flattened handles and lists of a hundred thousand names take tens of megabytes. */
export const BODY_LIMIT = 64 * 1024 * 1024

/**
 * For bodies with tensor handles: 19,000 handles of a mixture of experts take 9 MB in base64, repeated for every rank.
 */
export const TENSOR_BODY_LIMIT = 256 * 1024 * 1024

/** Value of `retry-after` with status 503. */
export const RETRY_AFTER_SECONDS = 1

/** Prompts of one request times its samples. */
export const MAX_BATCH = 4096

/** Bytes that the results of one request may take: tokens, scores, masks and experts of all its samples. */
export const MAX_REQUEST_MEMORY = 2 ** 30

/** Longest request id: ids are echoed, logged and kept. */
export const MAX_RID_LENGTH = 256

/**
 * Longest key of the prefix cache: every sample of a request has its own copy, and every node of the cache stores it.
 */
export const MAX_SALT_LENGTH = 1024

export const MAX_TOP_LOGPROBS = 1024

/** Bytes of a stream that may wait for a slow reader before events are merged instead. */
export const STREAM_HIGH_WATER = 64 * 1024

/** Bytes of finished samples that are kept for receipts. */
export const SAMPLES_MEMORY = 16 * 1024 * 1024
