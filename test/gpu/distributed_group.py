"""A process group of torch trainers and refit engines, seen from the outside: the ranks, the requests and the
broadcasts.

A group is described by a text with a letter per rank: `t` for a trainer, `a`, `b` ... for the ranks of an engine.
"taabb" is one trainer and two engines of two ranks each; "tabt" has a trainer behind the engines. The first rank
broadcasts.
"""

import concurrent.futures
import contextlib
import http.client
import os
import select
import threading
import time

from server import Refused, free_port
from tensor_process import Process, SenderFailed

INIT, UPDATE, DESTROY = (
    "/init_weights_update_group",
    "/update_weights_from_distributed",
    "/destroy_weights_update_group",
)
# Requests that a server must answer all the time, whatever it waits for.
ROUTES = ["/health", "/get_weight_version", "/server_info", "/metrics", "/v1/models"]


def trainer(env=None):
    """A trainer's process; `start` prepares it."""
    return Process(env, "distributed_trainer.py")


class Outcome:
    """The replies of all engines ({letter: reply or Refused}) and of all trainers (result or SenderFailed)."""

    def __init__(self, replies, trainers):
        self.replies, self.trainers = replies, trainers

    def failures(self):
        found = [f"engine {letter}: {reply}" for letter, reply in self.replies.items() if isinstance(reply, Exception)]
        found += [
            f"trainer {index}: {str(result)[-600:]}"
            for index, result in enumerate(self.trainers)
            if isinstance(result, Exception)
        ]
        found += [
            f"trainer {index} received {result['wrong']} tensors wrong"
            for index, result in enumerate(self.trainers)
            if isinstance(result, dict) and result["wrong"]
        ]
        return found

    def ok(self):
        failures = self.failures()
        if failures:
            raise AssertionError("\n".join(failures))
        return self

    def refusal(self, letter="a"):
        reply = self.replies[letter]
        if not isinstance(reply, Refused):
            raise AssertionError(f"engine {letter} was to refuse, and answered {str(reply)[:300]}")
        return reply


class Group:
    """`engines`: {letter: Server}. `trainers`: a started Process for each `t`. `shapes`: {name: shape} of their
    tensors."""

    def __init__(
        self,
        layout,
        engines,
        trainers,
        shapes,
        *,
        name="weights",
        backend="gloo",
        port=None,
        address="127.0.0.1",
        timeout_s=60,
    ):
        self.layout, self.engines, self.trainers = layout, engines, trainers
        self.shapes, self.name, self.backend = dict(shapes), name, backend
        self.port = free_port() if port is None else port
        self.address, self.timeout_s = address, timeout_s
        self.pool = concurrent.futures.ThreadPoolExecutor(8)

    def place(self, letter):
        """The body of an engine's init request."""
        return dict(
            master_address=self.address,
            master_port=self.port,
            rank_offset=self.layout.index(letter),
            world_size=len(self.layout),
            group_name=self.name,
            backend=self.backend,
        )

    def post(self, path, bodies, timeout=120):
        """Sends all requests at once, without waiting."""

        def one(letter, body):
            try:
                return self.engines[letter].post(path, body, timeout=timeout)
            except (Refused, OSError) as error:
                return error

        return {letter: self.pool.submit(one, letter, body) for letter, body in bodies.items()}

    def begin_trainers(self, do, **arguments):
        for rank, process in zip((rank for rank, who in enumerate(self.layout) if who == "t"), self.trainers):
            own = dict(rank=rank) if do == "join" else dict(root=rank == 0) if do == "prepare" else {}
            if do == "send" and rank > 0:
                own = dict(signal_after=None)
            # A trainer that has died reports it at the end.
            with contextlib.suppress(SenderFailed):
                process.begin(do, **{**arguments, **own})

    def end_trainers(self, limit_s=120):
        found = []
        for process in self.trainers:
            try:
                found.append(process.end(limit_s))
            except SenderFailed as error:
                found.append(error)
        return found

    def join(self, trainers_first=True, pause_s=0.0):
        """All ranks join, or it fails."""
        arguments = dict(
            group=self.name,
            address=self.address,
            port=self.port,
            world=len(self.layout),
            backend=self.backend,
            timeout_s=self.timeout_s,
        )
        bodies = {letter: self.place(letter) for letter in self.engines}
        if trainers_first:
            self.begin_trainers("join", **arguments)
            time.sleep(pause_s)
            asked = self.post(INIT, bodies)
        else:
            asked = self.post(INIT, bodies)
            time.sleep(pause_s)
            self.begin_trainers("join", **arguments)
        trainers = self.end_trainers()
        replies = {letter: reply.result() for letter, reply in asked.items()}
        return Outcome(replies, [result if isinstance(result, Exception) else None for result in trainers]).ok()

    def body(self, names, way, announce, **fields):
        entries = [(name, "bfloat16", list(self.shapes[name])) for name in names]
        entries = [(name, *announce.get(name, (dtype, shape))) for name, dtype, shape in entries]
        return dict(
            names=[name for name, *_ in entries],
            dtypes=[dtype for _, dtype, _ in entries],
            shapes=[shape for *_, shape in entries],
            group_name=self.name,
            **(dict(load_format="flattened_bucket") if way == "bucket" else {}),
            **fields,
        )

    def announce(self, names, way="each", announce=None, **fields):
        """Announces the broadcasts to all engines; {letter: future of the reply}."""
        return self.post(UPDATE, {letter: self.body(names, way, announce or {}, **fields) for letter in self.engines})

    def prepare(self, variant, names=None, way="each", **sent):
        """Prepares the trainers' tensors, before the announcement, because it takes time. `sent`: more arguments of
        distributed_trainer's prepare."""
        self.begin_trainers(
            "prepare", variant=variant, names=list(self.shapes) if names is None else names, way=way, **sent
        )
        for result in self.end_trainers():
            if isinstance(result, Exception):
                raise result

    def begin_send(self, signal_after=None, number="SIGKILL"):
        """`signal_after`: seconds after which the first trainer gets a signal."""
        self.begin_trainers(
            "send",
            group=self.name,
            **(dict(signal_after=signal_after, number=number) if signal_after is not None else {}),
        )

    def update(self, variant, names=None, way="each", announce=None, sent=None, body=None, **fields):
        """`announce`: {name: (dtype, shape)} that are announced instead of the true ones. `sent`: what is sent instead,
        as for `prepare`. `body(body)` changes the request."""
        names = list(self.shapes) if names is None else names
        bodies = {letter: self.body(names, way, announce or {}, **fields) for letter in self.engines}
        if body is not None:
            bodies = {letter: body(made) for letter, made in bodies.items()}
        self.prepare(variant, **{**dict(names=names, way=way), **(sent or {})})
        asked = self.post(UPDATE, bodies)
        self.begin_send()
        trainers = self.end_trainers()
        return Outcome({letter: reply.result() for letter, reply in asked.items()}, trainers)

    def leave(self, engines=True):
        asked = self.post(DESTROY, {letter: dict(group_name=self.name) for letter in self.engines}) if engines else {}
        self.begin_trainers("leave", group=self.name)
        trainers = self.end_trainers()
        return Outcome({letter: reply.result() for letter, reply in asked.items()}, trainers).ok()

    def close(self):
        self.pool.shutdown(wait=False)


class Watch:
    """Sends requests to a server all the time. Fails at the end if a status was not 200, or if a reply was pending for
    too long while the server slept or computed.

    Clock time is not used, because a machine may stop any process: a process that waits for a core, or that was
    stopped, does not sleep.
    """

    def __init__(self, server, limit_s=1.0, every_s=0.1):
        self.server, self.limit_s, self.every_s = server, limit_s, every_s
        self.longest, self.count, self.problems = (0.0, ""), 0, []
        self.first, self.over = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self):
        while not self.over.wait(self.every_s):
            path = ROUTES[self.count % len(ROUTES)]
            try:
                self.longest = max(self.longest, (self.pending(path), path))
            except (Refused, OSError, http.client.HTTPException) as error:
                self.problems.append(f"{path}: {error}")
            self.count += 1
            self.first.set()

    def pending(self, path, step_s=0.02, patience_s=120):
        """The longest time that the server slept, or computed, before it replied."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=patience_s)
        try:
            began, asleep, longest = self.server_thread()[1], 0.0, 0.0
            until = time.monotonic() + patience_s
            connection.request("GET", path)
            while time.monotonic() < until:
                sleeps, computed = self.server_thread()
                # Sent after that sample: a request from before the server fell asleep has arrived.
                if select.select([connection.sock], [], [], 0)[0]:
                    break
                asleep = asleep + step_s if sleeps else 0.0
                longest = max(longest, asleep, computed - began)
                time.sleep(step_s)
            reply = connection.getresponse()
            text = reply.read().decode(errors="replace")
            if reply.status != 200:
                raise Refused(reply.status, text)
            return longest
        finally:
            connection.close()

    def server_thread(self):
        """(whether it waits, seconds of computation) of the thread that replies."""
        pid = self.server.process.pid
        with open(f"/proc/{pid}/task/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return fields[0] == "S", (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, kind, error, trace):
        # The watched operation may have ended before the first reply.
        if kind is None:
            self.first.wait()
        self.over.set()
        self.thread.join()
        if kind is None:
            if self.problems or self.longest[0] > self.limit_s:
                raise AssertionError(
                    f"of {self.count} replies one was pending for {1000 * self.longest[0]:.0f} ms of the server's own "
                    f"({self.longest[1]}); {len(self.problems)} failed: {self.problems[:3]}"
                )
