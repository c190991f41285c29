"""The HTTP side of a trainer that posts handles, and torch's receive path as another server."""

import contextlib
import http.client
import json
import pathlib
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
PATH = "/update_weights_from_tensor"


class Client:
    """One connection that stays open, as a trainer's."""

    def __init__(self, port):
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)

    def post(self, body):
        """(milliseconds, reply). The body's text is the trainer's work, like its handles."""
        data = json.dumps(body).encode()
        began = time.perf_counter()
        self.connection.request("POST", PATH, data, {"content-type": "application/json"})
        reply = self.connection.getresponse()
        text = reply.read()
        ms = 1000 * (time.perf_counter() - began)
        if reply.status != 200:
            raise RuntimeError(f"{reply.status}: {text.decode(errors='replace')[:800]}")
        return ms, json.loads(text)


@contextlib.contextmanager
def torch_receiver(options, shapes):
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "bench/gpu/torch_receiver.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        process.stdin.write(json.dumps(dict(device=options.torch_device, shapes=shapes)) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line.strip():
            raise RuntimeError(f"bench/gpu/torch_receiver.py ended with {process.wait()}")
        yield Client(int(line))
    finally:
        process.kill()
        process.wait()
