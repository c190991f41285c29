"""Updates from tensors at the size of a real model."""

import time

import torch

import models
from harness import check, test
from machine import device_flags, room, torch_device
from server import Server
from tensor_process import Process
from tensor_setup import SENDERS, Problems, check_closed, check_given_back, on_card, post

MODEL = "qwen2.5-1.5b"


@test("tensor/real/qwen2.5-1.5b", gpu=True, real=True)
def real(options):
    """3 GB from torch's allocator, from a few buffers and from expandable segments, to one and two ranks: A, B, A, with
    checksums of everything."""
    config, notes, problems = models.REAL[MODEL], [], Problems()
    shapes = models.tensors(config)
    torch.cuda.empty_cache()
    with room(options, 0) as place:
        folder = models.hollow(place / "model", config)
        for ranks in [1, 2]:
            flags, env = device_flags(options, ranks)
            with Server(folder, *flags, "--max-total-tokens", 4096, env=env) as server:
                for name in ["plain", "expandable"]:
                    with Process(SENDERS[name]) as sender:
                        sender(
                            "start",
                            device=torch_device(options),
                            devices=[f"cuda:{i}" for i in range(min(2, torch.cuda.device_count()))],
                            config=config,
                            shapes=shapes,
                        )
                        sums = {variant: sender("sums", variant=variant) for variant in (1, 2)}
                        for where in ["ordinary", "pooled"] if name == "plain" else ["ordinary"]:
                            sender("make", variant=0, place=where)
                            for way in ["list-by-uuid", "large-buckets", "verl"] if where == "ordinary" else ["list"]:
                                what = f"tp {ranks}, {name} {where}, {way}"

                                def work():
                                    server.post("/weights_checker", dict(action="reset_tensors"))
                                    took = []
                                    for variant in (1, 2, 1):
                                        sender("fill", variant=variant)
                                        bodies = sender("pack", way=way, ranks=ranks)
                                        began = time.perf_counter()
                                        post(server, bodies)
                                        took.append(1000 * (time.perf_counter() - began))
                                        got = server.checksums()
                                        wrong = [one for one in sums[variant] if got.get(one) != sums[variant][one]]
                                        check(
                                            not wrong and got.keys() == sums[variant].keys(),
                                            f"{what}, variant {variant}: {len(wrong)} of {len(shapes)} tensors are "
                                            f"wrong: {wrong[:8]}",
                                        )
                                    kinds = check_given_back(sender, what)["kinds"]
                                    check_closed(server, what)
                                    notes.append(f"{what}: {min(took):.0f} ms, {kinds}")
                                    sender("forget")

                                problems(what, work, server)
                            left = sender("drop")
                            if on_card(options):
                                problems(
                                    f"{name} {where}",
                                    lambda: check(left["allocated"] == 0, f"the sender's memory is not free: {left}"),
                                )
                check(len(server.generate([[5, 6, 7]], 4)[0][0]) == 4, "it does not generate")
    problems.end()
    return "; ".join(notes)
