"""GPUs that do not reach each other's memory: ranks exchange through NCCL. REFIT_CUDA_NO_PEERS=1 forces it on GPUs that
do."""

import torch

import models
import numerics
import robust
from harness import Skip, check, test
from machine import cards, device_flags, room
from reference import prompts
from server import ROOT, Server

GOLDENS = ROOT / "test/goldens"
NO_PEERS = {"REFIT_CUDA_NO_PEERS": "1"}


def two_cards():
    if cards() < 2:
        raise Skip("two cards are needed: NCCL takes one rank a card")


def exchange_of(server):
    return server.get("/server_info")["isa"]


def answers(server, sequences):
    return (
        server.checksums(),
        server.score(sequences),
        server.generate(sequences, 32),
        server.generate(sequences, 32, temperature=1, sampling_seed=7),
    )


def against_transformers(name):
    def run(options):
        two_cards()
        return numerics.small(name, ranks=(2,), more_env=NO_PEERS)(options)

    return run


for architecture in ["qwen3", "qwen3-moe"]:
    test(f"no-peers/numerics/{architecture}", gpu=True)(against_transformers(architecture))


def same_bits(options, folder, vocabulary, lengths, tokens, variants):
    """Values that NCCL carries are summed as the peer kernels sum them: in rank order, in float32."""
    two_cards()
    sequences = prompts(29, lengths, vocabulary)
    notes = []
    for ranks in [2] + ([4] if cards() >= 4 else []):
        flags, env = device_flags(options, ranks)
        flags += ["--max-total-tokens", tokens]
        reach = all(torch.cuda.can_device_access_peer(a, b) for a in range(ranks) for b in range(ranks) if a != b)
        expected = None
        if reach:
            with Server(folder, *flags, env=env) as server:
                check(
                    "ranks exchange by peer access" in exchange_of(server), f"another exchange: {exchange_of(server)}"
                )
                expected = answers(server, sequences)
        for more in variants:
            what = f"tp {ranks}, {more}"
            with Server(folder, *flags, env={**env, **NO_PEERS, **more}) as server:
                check("ranks exchange by NCCL 2." in exchange_of(server), f"another exchange: {exchange_of(server)}")
                got = answers(server, sequences)
                start_s = server.start_s
            if expected is None:
                expected = got
            for name, one, other in zip(
                ("checksums", "logprobs", "greedy tokens", "samples"), got, expected, strict=True
            ):
                check(
                    one == other,
                    f"{what}: {name} differ from those through {'peer access' if reach else variants[0]}: "
                    f"{str(one)[:300]} and {str(other)[:300]}",
                )
            notes.append(f"{what or 'NCCL'}: ready after {start_s:.1f} s")
    return "; ".join(notes)


@test("no-peers/same-bits", gpu=True)
def small_same_bits(options):
    # The second variant is as on GPUs that only reach each other through the host.
    return same_bits(options, GOLDENS / "qwen3", 320, (2, 33, 200), 2048, [{}, {"NCCL_P2P_DISABLE": "1"}])


@test("no-peers/same-bits/real/qwen2.5-1.5b", gpu=True, real=True)
def real_same_bits(options):
    two_cards()
    name = "qwen2.5-1.5b"
    with room(options, models.size(models.tensors(models.REAL[name]))) as place:
        folder = models.real(name, place / "model", 1, "cuda:0")
        torch.cuda.empty_cache()
        return same_bits(options, folder, models.REAL[name]["vocab_size"], (2, 300, 1300), 8192, [{}])


@test("no-peers/update-and-sleep", gpu=True)
def update_and_sleep(options):
    """Weight updates, and released and resumed memory, with arenas that no other GPU sees."""
    two_cards()
    flags, env = device_flags(options, 2)
    flags += ["--max-total-tokens", 2048]
    env = {**env, **NO_PEERS}
    sequences = prompts(31, (2, 40), 320)
    with room(options) as place:
        second = models.reseeded(GOLDENS / "qwen3", place / "second", 99)
        with Server(second, *flags, env=env) as server:
            expected = answers(server, sequences)
        with Server(GOLDENS / "qwen3", *flags, "--model-root", place, env=env) as server:
            check(server.checksums() != expected[0], "the two models are the same: nothing was tested")
            for round in range(3):
                server.post("/release_memory_occupation", {})
                server.post("/resume_memory_occupation", {})
                server.post("/update_weights_from_disk", dict(model_path=str(second)))
                check(
                    answers(server, sequences) == expected,
                    f"round {round}: other answers than of a server that was started with these weights",
                )


@test("no-peers/stuck-card", gpu=True)
def stuck(options):
    """The watchdog reports a rank that never joins an exchange, and ends the process; a failing GPU is reported with
    its error."""
    two_cards()
    return "; ".join(
        [
            robust.dies(options, "hang:10:1", 2, 3 + 3, "--watchdog-timeout", 3, more_env=NO_PEERS),
            robust.dies(options, "illegal:10:0", 2, 1.5, more_env=NO_PEERS),
            robust.dies(options, "illegal:10:1", 2, 1.5, more_env=NO_PEERS),
        ]
    )


@test("no-peers/refused", gpu=True)
def refused(options):
    """Ranks that share a GPU without NCCL are refused with a message, before anything hangs."""
    flags = ["--device", "cuda", "--tp", 2, "--skip-tokenizer-init", "--max-total-tokens", 1024]
    cases = [({"REFIT_CUDA_SHARE_CARD": "1", "CUDA_VISIBLE_DEVICES": "0"}, ["share GPU 0", "REFIT_CUDA_NO_PEERS"])]
    if cards() > 1:
        cases.append(({"REFIT_NCCL": "/nowhere/libnccl.so.2"}, ["needs NCCL", "/nowhere/libnccl.so.2", "--tp 1"]))
    for env, expected in cases:
        try:
            with Server(GOLDENS / "qwen3", *flags, env={**NO_PEERS, **env}, wait_s=60) as server:
                raise AssertionError(f"{env}: it started, {exchange_of(server)}")
        except RuntimeError as error:
            said = str(error)
            missing = [part for part in expected if part not in said]
            check(not missing, f"{env}: nothing about {missing} in {said[-600:]}")
            check(
                "    at " not in said and "ended with -" not in said and "was not ready" not in said,
                f"{env}: {said[-600:]}",
            )
    return f"{len(cases)} cases"
