"""examples/trainers on GPUs: FSDP2 over two processes if there are two GPUs, engines of one and two ranks."""

import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time

import safetensors.torch

import models
import tensor_payloads as payloads
from harness import Skip, check, test
from machine import cards, device_flags, room
from server import ROOT, Server
from tensor_setup import GOLDENS, check_closed, on_card

LIMIT_S = 90


def run_trainers(script, count, arguments, more_env=None):
    """Processes as torchrun starts them, without its network."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = dict(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        WORLD_SIZE=str(count),
        LOCAL_WORLD_SIZE=str(count),
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo",
        NCCL_SOCKET_IFNAME="lo",
        NCCL_NVLS_ENABLE="0",
        HF_HUB_OFFLINE="1",
        PYTHONFAULTHANDLER="1",
    )
    command = [sys.executable, str(script), *map(str, arguments)]
    logs = [tempfile.TemporaryFile("w+") for _ in range(count)]
    running = [
        subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **world, **(more_env or {}), "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank, log in enumerate(logs)
    ]
    try:
        deadline = time.monotonic() + LIMIT_S
        while any(process.poll() is None for process in running):
            if time.monotonic() > deadline or any(process.poll() not in (None, 0) for process in running):
                time.sleep(1)  # the others may say why, too
                break
            time.sleep(0.1)
        codes = [process.poll() for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    said = []
    for log in logs:
        log.seek(0)
        said.append(log.read())
    check(
        codes == [0] * count,
        f"{script.name}: exit codes {codes} (None: still running after {LIMIT_S} s or after another's failure)\n"
        + "\n".join(f"rank {rank}:\n{text[-2500:]}" for rank, text in enumerate(said)),
    )
    return said[0]


def both(ranks):
    def run(options):
        if options.small and ranks == 1 and (not on_card(options) or cards() > 1):
            raise Skip("--small: two ranks are tried")
        notes = []
        # A GPU for each process: NCCL refuses to share one, and FSDP2 over gloo ends in a segmentation fault of torch
        # 2.11's.
        count = min(2, cards()) if on_card(options) else 2
        if ranks > count:
            raise Skip("one card: an engine of two ranks takes handles from two processes")
        for example in ["verl_style", "slime_style"]:
            with room(options, 0) as place:
                start = models.reseeded(GOLDENS / "llama", place / "start", 4)
                flags, env = device_flags(options, ranks)
                with Server(
                    start,
                    *flags,
                    *([] if on_card(options) else ["--dtype", "bfloat16"]),
                    "--max-total-tokens",
                    1024,
                    env=env,
                ) as server:
                    before = server.checksums()
                    arguments = [
                        "--url",
                        server.url,
                        "--model",
                        start,
                        "--device",
                        options.device,
                        "--steps",
                        2,
                        "--bucket-mb",
                        0.1,
                        "--save",
                        place / "end",
                    ]
                    said = run_trainers(pathlib.Path(ROOT) / "examples/trainers" / f"{example}.py", count, arguments)
                    check("step 2: updated" in said, said[-500:])
                    trained = payloads.checksums_of(
                        safetensors.torch.load_file(place / "end/model.safetensors").items()
                    )
                    got = server.checksums()
                    wrong = [name for name in trained if got.get(name) != trained[name]]
                    check(
                        got.keys() == trained.keys() and not wrong,
                        f"{example}: {len(wrong)} of {len(trained)} tensors are not the trainer's: {wrong[:8]}; only "
                        f"here or there: {sorted(got.keys() ^ trained.keys())[:5]}",
                    )
                    still = [name for name in before if before[name] == got[name] and "norm" not in name]
                    check(not still, f"{example}: not trained: {still[:5]}")
                    label = server.get("/get_weight_version")["weight_version"]
                    check(label == "step-2", f"the label is {label}")
                    check_closed(server, example)
                    check(len(server.generate([[5, 6, 7]], 4)[0][0]) == 4, "it does not generate")
            notes.append(example)
        return ", ".join(notes) + f" of {count} processes" + (f" on {cards()} cards" if on_card(options) else "")

    return run


for ranks in [1, 2]:
    test(f"tensor/examples/tp{ranks}")(both(ranks))
