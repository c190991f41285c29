import { request } from 'node:http'

// Open pages in a process of their own, as far as the server sees them: connections that read the event stream.
// usage: node page-readers.js URL NUMBER; prints "open" once all have their first frame.

const [url, number] = [process.argv[2]!, Number(process.argv[3])]
let open = 0
for (let i = 0; i < number; i++) {
  request(`${url}/ui/events`, reply => {
    reply.once('data', () => {
      if (++open === number) console.log('open')
    })
    reply.resume()
  })
    .end()
}
