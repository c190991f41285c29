"""Engines that fill themselves from others (--load-from): over NCCL between cards, over gloo where a card is shared or one side is a CPU."""

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
    """Flags of an engine whose ranks begin at a card; None: on the CPU."""
    if options.device == "cpu" or first is None:
        return ["--dtype", "bfloat16", "--threads", 2, "--tp", ranks]
    return ["--device", "cuda", "--base-gpu-id", first, "--tp", ranks]


def fill(options, folder, place, source, target, expect, flags=()):
    nccl = nccl_of_torch()
    env = dict(NCCL, **({"REFIT_NCCL": nccl} if nccl else {}))
    flags = ["--max-total-tokens", 4096, "--skip-tokenizer-init", *flags]
    stop, failures, count = threading.Event(), [], [0]
    with Server(folder, *at(options, *source), *flags, "--weight-version", "step-12", env=env) as peer:
        first = peer.generate(PROMPTS, 8)
        sums = peer.checksums()

        def generate():
            while not stop.is_set():
                try:
                    if peer.generate(PROMPTS, 8) != first:
                        failures.append("the peer generated something else while it was asked for its weights")
                    count[0] += 1
                except Exception as error:
                    failures.append(repr(error))
                    return

        client = threading.Thread(target=generate)
        client.start()
        try:
            with Server(bare(folder, place), *at(options, *target), *flags, "--load-from", peer.url, "--load-from-timeout", 100, env=env) as new:
                stop.set()
                client.join()
                how = re.search(r"weights come from .*?(?=\"})", new.text())
                check(how is not None and expect in how[0], f"expected {expect!r} in {how and how[0]!r}")
                got = new.checksums()
                wrong = [name for name in sums if got.get(name) != sums[name]]
                check(not wrong and got.keys() == sums.keys(), f"{len(wrong)} of {len(sums)} tensors differ: {wrong[:5]}")
                check(new.get("/model_info")["weight_version"] == "step-12", "the label is not the peer's")
                # Other ranks or another device add up in another order.
                if source[1] == target[1] and (source[0] is None) == (target[0] is None):
                    check(new.generate(PROMPTS, 8) == first, "it generates something else")
                check(not failures, "; ".join(failures[:3]))
                check(peer.get("/health")["status"] == "ok", "the peer is not well")
                started = new.start_s
        finally:
            stop.set()
            client.join()
    return f"{how[0][:160]}; ready after {started:.1f} s, the peer answered {count[0]} times meanwhile"


def between(source, target, expect, needed):
    def run(options):
        if options.device == "cuda" and cards() < needed:
            raise Skip(f"needs {needed} cards, there are {cards()}")
        with room(options) as place:
            return fill(options, GOLDENS / "qwen3", place, source, target, expect if options.device == "cuda" else "over gloo")

    return run


test("fleet/nccl/1-1", gpu=True)(between((0, 1), (1, 1), "over nccl", 2))
test("fleet/nccl/1-2", gpu=True)(between((0, 1), (1, 2), "over nccl", 3))
test("fleet/nccl/2-1", gpu=True)(between((0, 2), (2, 1), "over nccl", 3))
test("fleet/nccl/2-2", gpu=True)(between((0, 2), (2, 2), "over nccl", 4))
test("fleet/gloo/card-to-cpu")(between((0, 1), (None, 2), "over gloo", 1))
test("fleet/gloo/cpu-to-card")(between((None, 2), (0, 1), "over gloo", 1))


@test("fleet/gloo/one-card", gpu=True)
def one_card(options):
    with room(options) as place:
        return fill(options, GOLDENS / "qwen3", place, (0, 1), (0, 1), "which NCCL refuses", ["--mem-fraction", 0.2])


@test("fleet/real", gpu=True, real=True)
def real(options):
    """3 GB from one card to another; how long the new engine took and at which speed is told."""
    if cards() < 2:
        raise Skip(f"needs 2 cards, there are {cards()}")
    if min(free_on_card(0), free_on_card(1)) < 8e9:
        raise Skip("not enough free memory on the cards")
    with room(options, 4 << 30) as place:
        models.real("qwen2.5-1.5b", place / "model", 7, "cuda:0")
        torch.cuda.empty_cache()
        folder = place / "model"
        return fill(options, folder, place, (0, 1), (1, 1), "over nccl")
