"""A real server for the tests: the command line of this checkout, on a free port of the loopback."""
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Trainers of process groups, and how they are driven, are those of the tests on cards.
sys.path.append(str(ROOT / "test/gpu"))


def pytest_addoption(parser):
    parser.addoption("--rounds", type=int, default=5, help="how often tests go round that can go round for long")


class Server:
    def __init__(self, model, *flags, command="serve"):
        """`model`: what stands behind the command; None for nothing."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = subprocess.Popen(
            ["node", str(ROOT / "bin/refit.js"), command, *([] if model is None else [str(model)]), "--port", str(self.port), *map(str, flags)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(self.url + "/ready").read()
                return
            except OSError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    self.process.kill()
                    raise RuntimeError("the server did not start:\n" + self.process.stdout.read().decode())
                time.sleep(0.1)

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=30)
        return self.process.returncode


@pytest.fixture
def serve():
    servers = []

    def start(model, *flags):
        servers.append(Server(model, *flags))
        return servers[-1]

    yield start
    for server in servers:
        assert server.stop() == 0, "a clean end on SIGTERM"
