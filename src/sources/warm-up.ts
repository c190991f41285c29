import { readTensorBody } from '../wire/torch-body.ts'
import { packTensorBody } from '../wire/torch-packed.ts'

// Two tensors as torch 2.13 shares them. Only decoded, never opened.
const PAYLOAD =
  'gASV3AEAAAAAAABdlCiMDm1vZGVsLmEud2VpZ2h0lIwgdG9yY2gubXVsdGlwcm9jZXNzaW5nLnJlZHVjdGlvbnOUjA5yZWJ1aWxkX3RlbnNvcpSTlIwFdG9yY2iUjAZUZW' +
  '5zb3KUk5RoAowVcmVidWlsZF90eXBlZF9zdG9yYWdllJOUaAKMGHJlYnVpbGRfc3RvcmFnZV9maWxlbmFtZZSTlCiMDXRvcmNoLnN0b3JhZ2WUjA5VbnR5cGVkU3RvcmFn' +
  'ZZSTlEMmL3RtcC90b3JjaC1zaG0tZGlyLVNsanVCdy9tYW5hZ2VyLnNvY2uUQxkvdG9yY2hfMTM2NzRfMTI1MDYwNzM4MF8wlEsMdJRSlIwFdG9yY2iUjAhiZmxvYXQxNp' +
  'STlIaUUpQoSwBoBYwEU2l6ZZSTlEsCSwOGlIWUUpRLA0sBhpSJdJSHlFKUhpSMDm1vZGVsLmIud2VpZ2h0lGgEaAdoCWgLKGgOQyYvdG1wL3RvcmNoLXNobS1kaXItU2xq' +
  'dUJ3L21hbmFnZXIuc29ja5RDGS90b3JjaF8xMzY3NF8xOTU2NTgyNTM1XzGUSxB0lFKUaBOMB2Zsb2F0MzKUk5SGlFKUKEsAaBlLBIWUhZRSlEsBhZSJdJSHlFKUhpRlLg' +
  '=='
const ROUNDS = 300

/** Runs the decoder until it is compiled: the first large body in a fresh thread otherwise takes several times as long. */
export function warmUp (): void {
  for (let i = 0; i < ROUNDS; i++) {
    packTensorBody(readTensorBody({ entries: [PAYLOAD], loadFormat: null, ranks: 1 }))
  }
}
