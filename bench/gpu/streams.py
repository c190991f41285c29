"""Streamed requests whose gaps between tokens are measured where a client is: at a socket."""

import json
import subprocess
import sys

# A process of its own: other threads of the benchmark would hold it up between two events.
STREAM = """
import http.client, json, sys, time

port, body = json.load(sys.stdin)
connection = http.client.HTTPConnection("127.0.0.1", port)
connection.request("POST", "/generate", json.dumps(body), {"content-type": "application/json"})
last, found = None, []
for line in connection.getresponse():
    if line.startswith(b"data: {"):
        now = time.perf_counter()
        if last is not None:
            found.append(1000 * (now - last))
        last = now
print(json.dumps(found))
"""


class Stream:
    """One streamed request; the times between its events, in milliseconds. `fields`: more of /generate's."""

    def __init__(self, server, prompt, count, **fields):
        body = dict(
            input_ids=prompt,
            stream=True,
            sampling_params=dict(max_new_tokens=count, temperature=0, ignore_eos=True),
            **fields,
        )
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.process = subprocess.Popen([sys.executable, "-S", "-c", STREAM], **pipes)
        json.dump([server.port, body], self.process.stdin)
        self.process.stdin.close()

    def gaps(self):
        return json.loads(self.process.stdout.read())


def at(gaps, part):
    """The quantile of sorted gaps."""
    return gaps[int(part * (len(gaps) - 1))]


def spread(gaps):
    ordered = sorted(gaps)
    return ", ".join(f"p{100 * part:g} {at(ordered, part):.2f}" for part in (0.5, 0.9, 0.99, 0.999))
