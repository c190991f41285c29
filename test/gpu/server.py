"""A real server for the tests and benchmarks: the command line of this folder, on a free port of the loopback."""

import atexit
import collections
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]


def node():
    """$REFIT_NODE, else a bundle's node, else the system's."""
    bundled = ROOT / "node/bin/node"
    return os.environ.get("REFIT_NODE") or (str(bundled) if bundled.exists() else shutil.which("node") or "node")


# The program, as it is published; or joined into few files (scripts/join-modules.js), which starts in half of the time.
PROGRAM = ROOT / os.environ.get("REFIT_PROGRAM", "bin/refit.js")

# Options of Node.js itself, for all servers.
NODE_FLAGS = os.environ.get("REFIT_NODE_FLAGS", "").split()

# For all servers: REFIT_TEST_FLAGS=--shadow-weights runs the tests of updates over a second set of weights.
FLAGS = os.environ.get("REFIT_TEST_FLAGS", "").split()

# Below the system's range for outgoing connections, which could take a port before the server listens on it.
PORTS = range(*map(int, os.environ.get("REFIT_TEST_PORTS", "20000 32000").split()))


def free_port():
    """No other test process takes it before it is used: pytest-xdist's workers have separate ranges of ports."""
    own, count = (
        int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")),
        int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")),
    )
    for _ in range(100):
        port = random.choice(PORTS[own::count])
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"of 100 ports between {PORTS.start} and {PORTS.stop} none is free")


def settled(read, wanted, seconds=60):
    """Polls `read` until its value is the wanted one; returns the last value."""
    deadline = time.monotonic() + seconds
    while not wanted(value := read()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return value


class Refused(Exception):
    """A reply that is not a success."""

    def __init__(self, status, body):
        super().__init__(f"{status}: {body[:600]}")
        self.status, self.body = status, body


class Server:
    """`flags` as on the command line; `env` is added to the environment. Ready when it is made; a context manager."""

    def __init__(self, model, *flags, env=None, wait_s=300):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = tempfile.NamedTemporaryFile(prefix="refit-log-")
        command = [
            node(),
            *NODE_FLAGS,
            str(PROGRAM),
            *self.arguments(model),
            "--port",
            str(self.port),
            *map(str, flags),
            *FLAGS,
        ]
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            command, stdout=self.log, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})}
        )
        # The server must release the GPU however this program ends.
        atexit.register(self.kill)
        try:
            while True:
                try:
                    self.get("/ready")
                    self.start_s = time.monotonic() - self.started
                    return
                except (OSError, Refused):
                    if self.process.poll() is not None:
                        raise RuntimeError(
                            f"the server ended with {self.process.returncode} before it was ready:\n{self.tail()}"
                        ) from None
                    if time.monotonic() - self.started > wait_s:
                        raise RuntimeError(f"the server was not ready after {wait_s} s:\n{self.tail()}") from None
                    time.sleep(0.05)
        except BaseException:
            self.kill()
            raise

    def arguments(self, model):
        """The command line of the server."""
        return ["serve", str(model)]

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if kind is not None and error is not None:
            error.add_note(f"the server's log ends with\n{self.tail()}")
            self.kill()
        else:
            self.stop()

    def text(self):
        with open(self.log.name, errors="replace") as file:
            return file.read()

    def tail(self, lines=25):
        return "\n".join(line[:1500] for line in collections.deque(self.text().splitlines(), lines))

    def stop(self):
        """Ends it as a user does, and requires a clean end."""
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(120)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the server did not end within two minutes after SIGTERM:\n{self.tail()}") from None
        if code != 0:
            raise AssertionError(f"the server ended with {code} after SIGTERM:\n{self.tail()}")

    def kill(self):
        self.process.kill()
        self.process.wait()

    def request(self, method, path, body=None, timeout=300):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as reply:
                text = reply.read().decode()
                return json.loads(text) if "json" in reply.headers.get("content-type", "") else text
        except urllib.error.HTTPError as error:
            raise Refused(error.code, error.read().decode(errors="replace")) from None

    def get(self, path, timeout=60):
        return self.request("GET", path, timeout=timeout)

    def post(self, path, body=None, timeout=300):
        return self.request("POST", path, {} if body is None else body, timeout)

    def metric(self, name):
        """The value of a metric without labels of its own."""
        for line in self.get("/metrics").splitlines():
            if line.split("{")[0].split(" ")[0] == name:
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"/metrics has no {name}")

    # Frequent requests.

    def score(self, sequences, ids=None):
        """For each sequence the logprobs of its tokens 1.. given all before; with `ids` also those of these ids at each
        position."""
        body = dict(
            input_ids=sequences, sampling_params=dict(max_new_tokens=0), return_logprob=True, logprob_start_len=0
        )
        if ids is not None:
            body["token_ids_logprob"] = [ids] * len(sequences)
        metas = [reply["meta_info"] for reply in self.post("/generate", body)]
        tokens = [[entry[0] for entry in meta["input_token_logprobs"][1:]] for meta in metas]
        if ids is None:
            return tokens
        return tokens, [[[entry[0] for entry in row] for row in meta["input_token_ids_logprobs"][1:]] for meta in metas]

    def generate(self, prompts, count, **sampling):
        """For each prompt (output ids, their logprobs); greedy by default."""
        params = dict(dict(max_new_tokens=count, temperature=0, ignore_eos=True), **sampling)
        replies = self.post(
            "/generate", dict(input_ids=prompts, sampling_params=params, return_logprob=True), timeout=600
        )
        return [
            (reply["output_ids"], [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]])
            for reply in replies
        ]

    def checksums(self):
        return self.post("/weights_checker", dict(action="checksum"))["checksums"]
