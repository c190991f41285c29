"""Trainers, servers and GPUs of the tests of process groups, and the checks after each update.

The first trainer is on GPU 0, engines are on the next GPUs, further trainers on those after the engines: NCCL takes one
rank per GPU. On a CPU the same tests use gloo.
"""

import os


import harness
import models
from distributed_group import Group, trainer
from harness import Skip, check
from machine import cards
from server import ROOT, Refused, Server
from tensor_setup import check_sums, on_card

GOLDENS = ROOT / "test/goldens"
KIND = "qwen3"
# About a gigabyte: its broadcast takes long enough to be interrupted.
LARGE = dict(models.REAL["qwen3-8b"], num_hidden_layers=2, vocab_size=65536, tie_word_embeddings=True)
# How long a server waits for a peer, in seconds.
DEADLINE_S = 8
NCCL = dict(
    NCCL_NVLS_ENABLE="0", NCCL_SOCKET_IFNAME="lo", NCCL_DEBUG="WARN", GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1"
)
trainers, servers = {}, {}


def nccl_of_torch():
    """The library that torch has opened: both sides need the same."""
    with open("/proc/self/maps") as file:
        paths = {line.split()[-1] for line in file if "libnccl" in line}
    return sorted(paths)[0] if paths else None


def places(layout, options):
    """{index of the rank in the layout: GPU} (None on a CPU), or why the layout is impossible."""
    if not on_card(options):
        return {rank: None for rank in range(len(layout))}
    if len(layout) > cards():
        raise Skip(f"NOT TRIED: {layout} needs {len(layout)} cards, one for each rank, and there are {cards()}")
    order = sorted(
        range(len(layout)),
        key=lambda rank: (layout[rank] == "t" and rank != layout.index("t"), layout[rank] != "t", layout[rank], rank),
    )
    return {rank: card for card, rank in enumerate(order)}


def server_of(options, folder, letter, ranks, card, *flags):
    """A server that the tests share; a new one if the last test ended it."""
    key = (str(folder), letter, ranks, card, flags)
    server = servers.get(key)
    if server is None or server.process.poll() is not None:
        env = dict(NCCL)
        if on_card(options):
            where = ["--device", f"cuda:{card}"]
            if nccl_of_torch():
                env["REFIT_NCCL"] = nccl_of_torch()
        else:
            where = ["--device", "cpu", "--dtype", "bfloat16", "--threads", min(4, os.cpu_count())]
        servers[key] = Server(
            folder,
            *where,
            "--tp",
            ranks,
            "--max-total-tokens",
            1024,
            "--skip-tokenizer-init",
            "--group-timeout",
            DEADLINE_S,
            *flags,
            env=env,
            wait_s=120,
        )
    return servers[key]


def trainers_on(places_of, shapes):
    """One per place: a GPU, or the number of a trainer on the CPU. Prepared with a model's shapes."""
    for place in places_of:
        process = trainers.get(place)
        if process is None or not process.usable:
            if process is not None:
                process.kill()
            trainers[place] = trainer(NCCL)
        trainers[place].begin(
            "start",
            device=place if place.startswith("cuda") else "cpu",
            shapes=[[name, list(shape)] for name, shape in shapes],
        )
    for place in places_of:
        trainers[place].end()
    return [trainers[place] for place in places_of]


def shapes_in(folder):
    return [(name, entry[2]) for name, entry in models.headers(folder).items()]


def group_of(options, layout, folder=GOLDENS / KIND, flags=(), **more):
    """All processes of a layout, before they join."""
    where, shapes = places(layout, options), shapes_in(folder)
    letters = sorted(set(layout) - {"t"})
    engines = {
        letter: server_of(options, folder, letter, layout.count(letter), where[layout.index(letter)], *flags)
        for letter in letters
    }
    ranks = [rank for rank, who in enumerate(layout) if who == "t"]
    processes = trainers_on(
        [f"cuda:{where[rank]}" if on_card(options) else f"cpu {number}" for number, rank in enumerate(ranks)], shapes
    )
    return Group(layout, engines, processes, shapes, backend="nccl" if on_card(options) else "gloo", **more)


def holds(group, sums, variant, what):
    for letter, server in group.engines.items():
        check_sums(server, sums, variant, list(group.shapes.items()), f"{what}, engine {letter}, variant {variant}")
        check(server.metric("refit:weights_torn") == 0, f"{what}: engine {letter} says that weights are torn")


def spoil(group):
    for server in group.engines.values():
        server.post("/weights_checker", dict(action="reset_tensors"))


def drop_trainers(group):
    """Ends a group's trainers, because a communicator whose peers are gone cannot be used."""
    for process in group.trainers:
        process.kill()


def state_after(server, old, new, what):
    """The state of the weights in one word; fails if they are neither old, nor new, nor reported as torn."""
    got, health = server.checksums(), server.get("/health")
    if server.metric("refit:weights_torn") == 0:
        check(got in (old, new), f"{what}: weights that are neither old nor new, and not called torn")
        return "old" if got == old else "new"
    torn, count = health["weights"]["tensors"], health["weights"]["torn_count"]
    if len(torn) == count:
        mixed = [name for name in old if name not in torn and got.get(name) not in (old[name], new[name])]
        check(not mixed, f"{what}: neither old nor new, and not called torn: {mixed[:5]}")
    try:
        server.generate([[5, 6]], 2)
    except Refused as error:
        check(error.status == 503, f"{what}: torn, and generation says {error}")
        return f"torn ({count} tensors)"
    raise AssertionError(f"{what}: torn, and it generates")


def heals(options, layout, name, port, sums, variant, folder=GOLDENS / KIND, flags=()):
    """Joins again, with the same name and port."""
    group = group_of(options, layout, folder, flags, name=name, port=port)
    group.join()
    group.update(variant).ok()
    holds(group, sums, variant, f"the attempt after ({name})")
    group.leave()
    group.close()


def close_all():
    for process in trainers.values():
        process.close()
    trainers.clear()
    problems = []
    for key, server in servers.items():
        if server.process.poll() is None:
            try:
                server.stop()
            except AssertionError as error:
                problems.append(f"{key}: {error}")
    servers.clear()
    check(not problems, "\n".join(problems))


harness.at_end("distributed/end", close_all)
