/** undici apart: it takes a tenth of a server's start, and most servers open no connection. */
export { Pool } from 'undici'
