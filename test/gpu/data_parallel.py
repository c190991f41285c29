"""Engines side by side behind one port (--dp): each on its own GPU, one update for all of them."""

import sys

import torch

import models
import tensor_payloads as payloads
from harness import Skip, check, test
from machine import cards, free_on_card, room
from server import ROOT, Server

sys.path.insert(0, str(ROOT / "clients/python"))
GOLDENS = ROOT / "test/goldens"
PROMPTS = [[5, 6, 7], [9, 8, 7, 6], [3]]


def answers(server, rank):
    body = dict(
        input_ids=PROMPTS, sampling_params=dict(max_new_tokens=8, temperature=0, ignore_eos=True), routed_dp_rank=rank
    )
    replies = server.post("/generate", body)
    wrong = [reply["meta_info"] for reply in replies if reply["meta_info"]["dp_rank"] != rank]
    check(not wrong, f"asked for rank {rank}, got {wrong}")
    return [reply["output_ids"] for reply in replies]


def checksums(server):
    engines = server.post("/weights_checker", dict(action="checksum"))["engines"]
    check(len(engines) == 2, f"expected the checksums of two engines, got {list(engines)}")
    return [engine["checksums"] for engine in engines.values()]


@test("data-parallel/two-cards", gpu=True)
def two_cards(options):
    from refit import Client

    if cards() < 2:
        raise Skip(f"NOT TRIED: two engines on a card each, and there are {cards()}")
    shapes = {name: entry[2] for name, entry in models.headers(GOLDENS / "qwen3").items()}
    with room(options) as place:
        folders = [models.reseeded(GOLDENS / "qwen3", place / f"v{seed}", seed) for seed in (5, 6)]
        expected = []
        for folder in folders:
            with Server(folder, "--device", "cuda", "--max-total-tokens", 1024, "--skip-tokenizer-init") as one:
                expected.append((one.checksums(), [ids for ids, _ in one.generate(PROMPTS, 8)]))
        check(expected[0][1] != expected[1][1], "the two models answer alike: nothing is tested")
        before = [free_on_card(card) for card in (0, 1)]
        flags = ["--device", "cuda", "--dp", 2, "--max-total-tokens", 1024, "--skip-tokenizer-init"]
        with Server(folders[0], *flags, "--model-root", place) as server:
            used = [was - free_on_card(card) for card, was in enumerate(before)]
            check(min(used) > 100e6, f"each card should hold an engine, they hold {used} bytes")
            for variant in (0, 1, 0):
                server.post(
                    "/update_weights_from_disk", dict(model_path=str(folders[variant]), weight_version=f"v{variant}")
                )
                for rank, sums in enumerate(checksums(server)):
                    check(sums == expected[variant][0], f"rank {rank} holds other weights than version {variant}")
                    check(answers(server, rank) == expected[variant][1], f"rank {rank} answers as another version")
            client = Client(server.url)
            # From the first card into both.
            for variant in (1, 2):
                sent = {name: payloads.coded(variant, name, shape, "cuda:0") for name, shape in shapes.items()}
                with client.update(version=f"coded-{variant}", transport="handles") as update:
                    update.add_all(sent)
                torch.cuda.synchronize()
                wanted = payloads.checksums_of((name, tensor.cpu()) for name, tensor in sent.items())
                for rank, sums in enumerate(checksums(server)):
                    check(sums == wanted, f"rank {rank} does not hold what was sent by handles")
    return f"{', '.join(f'{size / 1e6:.0f}' for size in used)} MB on the cards"
