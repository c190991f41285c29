"""Servers and senders that the tests of tensor updates share, and the checks after each update."""

import concurrent.futures
import json
import re

import torch

import harness
import models
import tensor_payloads as payloads
from harness import Skip, check
from machine import cards, device_flags
from server import ROOT, Refused, Server
from tensor_process import Process, remove_files_of_the_dead, shared_files

GOLDENS = ROOT / "test/goldens"
PATH = "/update_weights_from_tensor"

# torch's allocator mode and the visible GPUs are fixed when a process starts.
SENDERS = {
    "plain": {},
    "expandable": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    "last-card": {},
}
servers, senders, starting = {}, {}, {}
pool = concurrent.futures.ThreadPoolExecutor(4)


def on_card(options):
    return options.device != "cpu"


def shapes_of(kind):
    return [(name, entry[2]) for name, entry in models.headers(GOLDENS / kind).items()]


def config_of(kind):
    return json.loads((GOLDENS / kind / "config.json").read_text())


def server_of(options, kind, ranks):
    """A server that the tests share; a new one if the last test ended it."""
    start_ahead(options, kind, ranks)
    if (kind, ranks) in starting:
        servers[kind, ranks] = starting.pop((kind, ranks)).result()
    return servers[kind, ranks]


def start_ahead(options, kind, ranks):
    """Starts it unless it runs, without waiting."""
    server = servers.get((kind, ranks))
    if (kind, ranks) in starting or (server is not None and server.process.poll() is None):
        return
    servers.pop((kind, ranks), None)
    flags, env = device_flags(options, ranks)
    flags += ["--dtype", "bfloat16"] if options.device == "cpu" else []
    starting[kind, ranks] = pool.submit(Server, GOLDENS / kind, *flags, "--max-total-tokens", 1024, env=env, wait_s=60)


def sender_of(options, kind, name="plain"):
    """A sender whose tensors of a model are not made yet."""
    sender = senders.get(name)
    if sender is not None and not sender.usable:
        sender.kill()
        sender = None
    if sender is None:
        env = dict(SENDERS[name])
        if name == "last-card":
            env["CUDA_VISIBLE_DEVICES"] = str(cards() - 1)
        sender = senders[name] = Process(env)
    begin(options, sender, kind, name)
    sender("forget")
    return sender


def begin(options, sender, kind, name="plain"):
    device = "cuda:0" if on_card(options) else "cpu"
    devices = (
        [f"cuda:{i}" for i in range(1 if name == "last-card" else min(2, cards()))] if on_card(options) else ["cpu"]
    )
    return sender("start", device=device, devices=devices, config=config_of(kind), shapes=shapes_of(kind))


def close_all():
    """Every server ends as a user ends it."""
    for sender in senders.values():
        sender.close()
    senders.clear()
    remove_files_of_the_dead()
    for key, started in list(starting.items()):
        servers[key] = started.result()
    starting.clear()
    # A server that a test ended was reported by that test.
    ends = {key: pool.submit(server.stop) for key, server in servers.items() if server.process.poll() is None}
    servers.clear()
    problems = [f"{key}: {end.exception()}" for key, end in ends.items() if end.exception() is not None]
    left = shared_files()
    check(not problems, "\n".join(problems))
    return f"{len(left)} files of torch's are left in /dev/shm: {left[:5]}" if left else ""


harness.at_end("tensor/end", close_all)


def post(server, bodies, **fields):
    """Sends all requests of an update; returns the last reply."""
    reply = None
    for body in bodies:
        reply = server.post(PATH, {**body, **fields}, timeout=60)
    return reply


def refusal(server, body, **fields):
    """The refusal of a body that must be refused."""
    try:
        said = server.post(PATH, {**body, **fields}, timeout=60)
    except Refused as error:
        return error
    raise AssertionError(f"it was taken: {str(said)[:300]}")


def values_of(server, name, rows):
    got = server.post("/get_weights_by_name", dict(name=name, truncate_size=rows))
    return torch.tensor(
        [
            [float("nan") if value is None else value for value in row]
            if isinstance(row, list)
            else (float("nan") if row is None else row)
            for row in got
        ]
    )


def explain(server, name, shape, variant):
    """Describes how a tensor differs from the sent one."""
    rows = min(shape[0], 64)
    try:
        got = values_of(server, name, rows)
    except Exception as error:
        return f"{name} {list(shape)} could not be read back: {str(error)[:200]}"
    wanted = payloads.coded(variant, name, shape)[:rows].float()
    wrong = got != wanted
    if got.shape != wanted.shape or not wrong.any():
        return (
            f"{name} {list(shape)}: the first {rows} rows are right"
            if got.shape == wanted.shape
            else f"{name}: {list(got.shape)} read back"
        )
    first = tuple(wrong.nonzero()[0].tolist())
    from_variant = [
        v for v in range(30) if torch.equal(got[wrong], payloads.coded(v, name, shape)[:rows].float()[wrong])
    ]
    return (
        f"{name} {list(shape)}: {int(wrong.sum())} of {wrong.numel()} elements (first {rows} rows) are wrong, the "
        f"first at {list(first)}: {got[first]}, sent {wanted[first]}; "
        f"rows {sorted({int(row) for row in wrong.nonzero()[:, 0]})[:6]}; "
        + (f"they are those of variant {from_variant}" if from_variant else "of no variant: noise, or never written")
    )


def check_sums(server, expected, variant, shapes, what):
    got = server.checksums()
    wrong = [name for name in expected if got.get(name) != expected[name]]
    if got.keys() == expected.keys() and not wrong:
        return
    sizes = dict(shapes)
    detail = "\n  ".join(explain(server, name, sizes[name], variant) for name in wrong[:3])
    raise AssertionError(
        f"{what}: {len(wrong)} of {len(expected)} tensors are not what was sent: {wrong[:8]}; names only here or "
        f"there: {sorted(got.keys() ^ expected.keys())[:5]}\n  {detail}"
    )


def opened_and_closed(server):
    """{resource: (opened, closed)} for all counters of the server."""
    text = server.get("/metrics")
    found = {}
    for what, state, value in re.findall(r"^refit:(\w+)_(opened|closed)_total(?:\{.*?\})? (\S+)$", text, re.M):
        found.setdefault(what, {})[state] = float(value)
    return {what: (entry.get("opened"), entry.get("closed")) for what, entry in found.items()}


def check_closed(server, what, kept=0):
    counts = opened_and_closed(server)
    open_still = {
        name: pair
        for name, pair in counts.items()
        if pair[0] is None or pair[1] is None or not 0 <= pair[0] - pair[1] <= kept
    }
    check(counts and not open_still, f"{what}: opened and closed in /metrics: {counts}")
    return counts


def check_given_back(sender, what):
    """Every handle's counter is at 0, or was removed with the sender's memory."""
    shares = sender("shares")
    check(
        set(shares["left"]) <= {"0", "gone"},
        f"{what}: {{counter: shares}} of {shares['count']} shares: {shares['left']} (1: not given back; below 0: "
        f"given back twice)",
    )
    return shares


class Problems:
    """Collects problems, so one run reports all of them."""

    def __init__(self):
        self.found = []

    def __call__(self, what, run, server=None):
        try:
            return run()
        except (Skip, harness.TooLong):
            raise
        except Exception as error:
            said = f"{what}: {type(error).__name__}: {error}"
            if server is not None and server.process.poll() is not None:
                said += f"\nTHE SERVER ENDED with {server.process.returncode}; its log ends with\n{server.tail()}"
            print(f"  PROBLEM {said}", flush=True)
            self.found.append(said)

    def end(self, server=None):
        if self.found:
            log = "" if server is None else f"\nthe server's log ends with\n{server.tail(12)}"
            first = self.found[0].splitlines()[0]
            raise AssertionError(f"{len(self.found)} problems, the first: {first}\n" + "\n".join(self.found) + log)
