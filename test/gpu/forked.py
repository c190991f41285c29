"""Processes with torch, each a fork of one that has imported it: an import takes seconds of CPU, a fork none.

Run as a program, it is the process that forks. Its arguments are a socket, a folder and modules that lie there. For
each fork it gets a program, its variables and its three streams.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import pathlib
import runpy
import select
import signal
import socket
import subprocess
import sys


# Variables that are read later than at an import: a fork gets its own.
LATE = {"GLOO_SOCKET_IFNAME", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"}


class Imported:
    """A process that has imported torch and more modules, with variables that an import reads."""

    made = {}

    def __init__(self, env, modules):
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, str(theirs.fileno()), *modules]
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, env={**os.environ, **env}, pass_fds=[theirs.fileno()]
        )
        theirs.close()
        atexit.register(self.end)

    @classmethod
    def of(cls, env, modules):
        """`modules`: their folder, then their names; or nothing."""
        read = {name: value for name, value in env.items() if name not in LATE and os.environ.get(name) != value}
        key = tuple(sorted(read.items())), tuple(modules)
        if key not in cls.made:
            cls.made[key] = cls(read, modules)
        return cls.made[key]

    def fork(self, program, streams, env):
        """The process id of a fork that runs the program."""
        socket.send_fds(self.socket, [json.dumps([program, {**os.environ, **env}]).encode()], streams)
        return int(self.socket.recv(64))

    def end(self):
        self.socket.close()
        self.process.wait()


class Popen:
    """A fork that runs a program of Python: what subprocess.Popen is for a new process, with pipes to its streams.

    `modules`: what the program imports besides torch, from its folder and from the folders that they add.
    """

    def __init__(self, program, stderr, env, modules=()):
        (theirs_in, ours_in), (ours_out, theirs_out) = os.pipe(), os.pipe()
        try:
            imported = Imported.of(env, [str(pathlib.Path(program).parent), *modules] if modules else [])
            self.pid = imported.fork(program, [theirs_in, theirs_out, stderr.fileno()], env)
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        # It waits for its first call, so it has not ended and the number is its own.
        self.pidfd = os.pidfd_open(self.pid)
        self.stdin, self.stdout = os.fdopen(ours_in, "wb"), os.fdopen(ours_out, "rb")

    def __del__(self):
        os.close(self.pidfd)

    def ended(self, timeout):
        return bool(select.select([self.pidfd], [], [], timeout)[0])

    def poll(self):
        """None while it runs. How it ended is not known."""
        return "an end" if self.ended(0) else None

    def wait(self, timeout=None):
        if not self.ended(timeout):
            raise subprocess.TimeoutExpired(f"the fork {self.pid}", timeout)

    def kill(self):
        if not self.ended(0):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)


def reap(*_):
    try:
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            pass
    except ChildProcessError:
        pass


def serve(channel):
    """Forks for each request. Returns the program in the fork, and None at the end of the requests."""
    signal.signal(signal.SIGCHLD, reap)
    while True:
        data, streams, _, _ = socket.recv_fds(channel, 1 << 20, 3)
        if not data:
            return None
        program, env = json.loads(data)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            channel.close()
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            os.environ.update(env)
            return program
        for stream in streams:
            os.close(stream)
        channel.send(str(pid).encode())


if __name__ == "__main__":
    # It ends with the process that started it.
    ctypes.CDLL(None).prctl(1, 9)
    # A collection amid imports finds nothing, and takes a fifth of their time.
    gc.disable()
    import torch.distributed
    import torch.multiprocessing.reductions  # noqa: F401

    if sys.argv[2:]:
        sys.path[0] = sys.argv[2]
        for module in sys.argv[3:]:
            importlib.import_module(module)
    # A collection in a fork neither walks nor copies what has been imported.
    gc.freeze()
    gc.enable()
    chosen = serve(socket.socket(fileno=int(sys.argv[1])))
    if chosen is not None:
        sys.argv, folder = [chosen], str(pathlib.Path(chosen).parent)
        if folder not in sys.path:
            sys.path[0] = folder
        runpy.run_path(chosen, run_name="__main__")
