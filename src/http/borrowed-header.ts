/**
 * A header of a gateway's requests whose handles go to several engines. A sender holds one reference for each handle,
 * so only the engine whose request lacks the header gives them back, and it gets the request last.
 */
export const BORROWED_HEADER = 'x-refit-borrowed-handles'
