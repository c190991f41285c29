"""Engines that load weights from others (--load-from, /update_weights_from_peer): over NCCL between GPUs, over gloo if
both use one GPU or one side is a CPU."""

import pathlib
import re
import shutil
import threading

import torch

import models
from distributed_setup import NCCL, nccl_of_torch
from harness import Skip, check, test
from machine import cards, free_on_card, room
from server import Server

GOLDENS = pathlib.Path(__file__).resolve().parents[2] / "test/goldens"
PROMPTS = [[5, 6, 7], [9, 8, 7, 6], [3]]


def bare(folder, place):
    """The configuration of a model, without its weights."""
    to = place / "bare"
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns("*.safetensors*"))
    return to


def at(options, first, ranks):
    """Flags of an engine whose ranks begin at a GPU; None: on the CPU."""
    if options.device == "cpu" or first is None:
        return ["--dtype", "bfloat16", "--threads", 2, "--tp", ranks]
    return ["--device", "cuda", "--base-gpu-id", first, "--tp", ranks]


class Asking:
    """A client that sends requests without a pause inside its block. Every reply must be one of these; None among them
    allows any."""

    def __init__(self, server, *answers):
        self.server = server
        self.answers = answers
        self.count = 0
        self.failures = []
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.run)

    def run(self):
        while not self.over.is_set():
            try:
                if self.server.generate(PROMPTS, 8) not in self.answers and None not in self.answers:
                    self.failures.append("it generated something else")
                self.count += 1
            except Exception as error:
                self.failures.append(repr(error))
                return

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()

    def check(self):
        check(not self.failures, "; ".join(self.failures[:3]))


def environment():
    nccl = nccl_of_torch()
    return dict(NCCL, **({"REFIT_NCCL": nccl} if nccl else {}))


def alike(source, target):
    """Another number of ranks, or another device, adds in another order."""
    return source[1] == target[1] and (source[0] is None) == (target[0] is None)


def same_checksums(got, sums):
    wrong = [name for name in sums if got.get(name) != sums[name]]
    check(not wrong and got.keys() == sums.keys(), f"{len(wrong)} of {len(sums)} tensors differ: {wrong[:5]}")


def fill(options, folder, place, source, target, expect, flags=()):
    env = environment()
    flags = ["--max-total-tokens", 4096, "--skip-tokenizer-init", *flags]
    with Server(folder, *at(options, *source), *flags, "--weight-version", "step-12", env=env) as peer:
        first = peer.generate(PROMPTS, 8)
        with Asking(peer, first) as client:
            with Server(
                bare(folder, place),
                *at(options, *target),
                *flags,
                "--load-from",
                peer.url,
                "--load-from-timeout",
                100,
                env=env,
            ) as new:
                client.over.set()
                how = re.search(r"weights come from .*?(?=\"})", new.text())
                check(how is not None and expect in how[0], f"expected {expect!r} in {how and how[0]!r}")
                same_checksums(new.checksums(), peer.checksums())
                check(new.get("/model_info")["weight_version"] == "step-12", "the label is not the peer's")
                check(not alike(source, target) or new.generate(PROMPTS, 8) == first, "it generates something else")
                check(peer.get("/health")["status"] == "ok", "the peer is not well")
                started = new.start_s
        client.check()
    return f"{how[0][:160]}; ready after {started:.1f} s, the peer answered {client.count} times meanwhile"


def refill(options, place, source, target, backend):
    """A serving engine loads the weights of another one, twice, while both get requests."""
    env = environment()
    second = models.reseeded(GOLDENS / "qwen3", place / "second", 99)
    flags = ["--max-total-tokens", 4096, "--skip-tokenizer-init", "--allow-master", "127.0.0.1", "--model-root", place]
    times = []
    with (
        Server(GOLDENS / "qwen3", *at(options, *source), *flags, "--weight-version", "a", env=env) as peer,
        Server(second, *at(options, *target), *flags, "--weight-version", "b", env=env) as one,
    ):
        answers, before = peer.generate(PROMPTS, 8), one.generate(PROMPTS, 8)
        check(answers != before, "the two models answer alike: nothing is tested")
        after = answers if alike(source, target) else None
        with Asking(peer, answers) as asked, Asking(one, before, after) as client:
            for _ in range(2):
                reply = one.post("/update_weights_from_peer", dict(url=peer.url))
                check(
                    reply["backend"] == backend and reply["weight_version"] == "a",
                    f"expected {backend} and version a, got {reply}",
                )
                times.append(reply["report"]["ms"]["total"])
                same_checksums(one.checksums(), peer.checksums())
                one.post("/update_weights_from_disk", dict(model_path=str(second), weight_version="b"))
        asked.check()
        client.check()
        check(one.generate(PROMPTS, 8) == before, "it generates something else")
    return f"{backend}; {', '.join(f'{ms:.0f}' for ms in times)} ms; {asked.count} and {client.count} answers meanwhile"


def between(source, target, expect, needed):
    def run(options):
        if options.device == "cuda" and cards() < needed:
            raise Skip(f"needs {needed} cards, there are {cards()}")
        with room(options) as place:
            return fill(
                options, GOLDENS / "qwen3", place, source, target, expect if options.device == "cuda" else "over gloo"
            )

    return run


test("fleet/nccl/1-1", gpu=True)(between((0, 1), (1, 1), "over nccl", 2))
test("fleet/nccl/1-2", gpu=True)(between((0, 1), (1, 2), "over nccl", 3))
test("fleet/nccl/2-1", gpu=True)(between((0, 2), (2, 1), "over nccl", 3))
test("fleet/nccl/2-2", gpu=True)(between((0, 2), (2, 2), "over nccl", 4))
test("fleet/gloo/card-to-cpu")(between((0, 1), (None, 2), "over gloo", 1))
test("fleet/gloo/cpu-to-card")(between((None, 2), (0, 1), "over gloo", 1))


def served(source, target, backend, needed):
    def run(options):
        if options.device == "cuda" and cards() < needed:
            raise Skip(f"needs {needed} cards, there are {cards()}")
        with room(options) as place:
            return refill(options, place, source, target, backend if options.device == "cuda" else "gloo")

    return run


test("fleet/served/1-1", gpu=True)(served((0, 1), (1, 1), "nccl", 2))
test("fleet/served/1-2", gpu=True)(served((0, 1), (1, 2), "nccl", 3))
test("fleet/served/2-1", gpu=True)(served((0, 2), (2, 1), "nccl", 3))
test("fleet/served/2-2", gpu=True)(served((0, 2), (2, 2), "nccl", 4))
test("fleet/served/card-and-cpu")(served((None, 2), (0, 1), "gloo", 1))


@test("fleet/gloo/one-card", gpu=True)
def one_card(options):
    with room(options) as place:
        return fill(options, GOLDENS / "qwen3", place, (0, 1), (0, 1), "which NCCL refuses", ["--mem-fraction", 0.2])


@test("fleet/real", gpu=True, real=True)
def real(options):
    """3 GB from one GPU to another; the note has the new engine's time and speed."""
    if cards() < 2:
        raise Skip(f"needs 2 cards, there are {cards()}")
    if min(free_on_card(0), free_on_card(1)) < 8e9:
        raise Skip("not enough free memory on the cards")
    with room(options, 4 << 30) as place:
        models.real("qwen2.5-1.5b", place / "model", 7, "cuda:0")
        torch.cuda.empty_cache()
        folder = place / "model"
        return fill(options, folder, place, (0, 1), (1, 1), "over nccl")
