"""Sending processes, as the tests see them; and the system's figures of any process."""

import json
import os
import pathlib
import select
import subprocess
import sys
import tempfile
import time

import forked

HERE = pathlib.Path(__file__).resolve().parent


# With GPUs each sender is a new process: its memory and its files are measured, and CUDA's libraries stay apart.
FORKS = not os.path.exists("/dev/nvidiactl")


def started(program, log, env, modules=()):
    """`modules`: what a fork need not import (forked.py)."""
    if FORKS:
        return forked.Popen(program, log, env, modules)
    return subprocess.Popen(
        [sys.executable, program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env={**os.environ, **env},
    )


class SenderFailed(Exception):
    pass


# Shared by all senders: a killed one leaves its counter files behind.
PIDS = []


class Process:
    """A sender (`program`). Every call has a time limit; a sender that does not answer is killed."""

    def __init__(self, env=None, program="tensor_sender.py"):
        self.log = tempfile.NamedTemporaryFile(prefix="refit-sender-")
        self.process = started(str(HERE / program), self.log, env or {})
        PIDS.append(self.process.pid)
        self.buffer = b""
        self.asked = None  # what it has not answered yet

    @property
    def pid(self):
        return self.process.pid

    @property
    def usable(self):
        return self.process.poll() is None and self.asked is None

    def begin(self, do, **arguments):
        """Sends a call without waiting; `end` waits."""
        self.asked = do
        try:
            self.process.stdin.write(json.dumps({"do": do, "with": arguments}).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise SenderFailed(f"the sender has ended with {self.process.poll()}:\n{self.tail()}") from None

    def end(self, limit_s=120):
        deadline = time.monotonic() + limit_s
        out = self.process.stdout.fileno()
        while b"\n" not in self.buffer:
            ready, _, _ = select.select([out], [], [], max(0, deadline - time.monotonic()))
            data = os.read(out, 1 << 20) if ready else b""
            if not data:
                why = f"did not answer within {limit_s} s" if not ready else "has ended"
                self.kill()
                raise SenderFailed(f"the sender {why}, asked to {self.asked}:\n{self.tail()}")
            self.buffer += data
        line, self.buffer = self.buffer.split(b"\n", 1)
        reply = json.loads(line)
        asked, self.asked = self.asked, None
        if "error" in reply:
            raise SenderFailed(f"the sender failed, asked to {asked}: {reply['error']}")
        return reply["result"]

    def __call__(self, do, **arguments):
        self.begin(do, **arguments)
        return self.end()

    def tail(self):
        with open(self.log.name, errors="replace") as file:
            return "".join(file.readlines()[-15:])

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            try:
                pipe.close()
            except BrokenPipeError:
                pass

    def close(self):
        """Lets the process end normally."""
        try:
            self.process.stdin.close()
            self.process.wait(20)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            pass
        self.kill()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def lines(path):
    with open(path) as file:
        return sum(1 for _ in file)


def footprint(pid):
    """The resources of a process."""
    with open(f"/proc/{pid}/status") as file:
        resident = next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) / 1024
    # A heap's mappings come and go; those of GPUs and of shared memory do not.
    with open(f"/proc/{pid}/maps") as file:
        devices = sum("/dev/" in line for line in file)
    return dict(
        device_mappings=devices,
        descriptors=len(os.listdir(f"/proc/{pid}/fd")),
        threads=len(os.listdir(f"/proc/{pid}/task")),
        mappings=lines(f"/proc/{pid}/maps"),
        resident_mb=round(resident),
    )


def remove_files_of_the_dead():
    for pid in PIDS:
        if not os.path.exists(f"/proc/{pid}"):
            for path in shared_files(pid):
                pathlib.Path(path).unlink(missing_ok=True)


def shared_files(pid=None):
    """Files of shared memory that torch has made, of one process or of all."""
    return sorted(str(path) for path in pathlib.Path("/dev/shm").glob("torch_*" if pid is None else f"torch_{pid}_*"))
