"""examples/trainers/broadcast_style.py: FSDP2 trainers on the first GPUs, one or two engines on the next."""

import safetensors.torch

import models
import tensor_payloads as payloads
from distributed_setup import GOLDENS, NCCL, nccl_of_torch
from harness import Skip, check, test
from machine import cards, room
from server import ROOT, Server
from tensor_examples import run_trainers
from tensor_setup import on_card


def engines_of(options, start, ranks, first):
    """[(flags, environment)] of engines behind GPU `first`."""
    found = []
    for count in ranks:
        if on_card(options):
            found.append(
                (
                    ["--device", f"cuda:{first}"],
                    dict(NCCL, **(dict(REFIT_NCCL=nccl_of_torch()) if nccl_of_torch() else {})),
                )
            )
        else:
            found.append((["--device", "cpu", "--dtype", "bfloat16", "--threads", 2], NCCL))
        found[-1][0].extend(["--tp", count, "--max-total-tokens", 1024, "--skip-tokenizer-init"])
        first += count
    return found


def example(ranks, bucketed):
    def run(options):
        # Two trainers on a GPU each, or one if there is only one GPU for it.
        spare = cards() - sum(ranks)
        if on_card(options) and spare < 1:
            raise Skip(f"NOT TRIED: engines on {sum(ranks)} cards and a trainer on another, and there are {cards()}")
        trainer_cards = min(2, spare) if on_card(options) else 0
        trainers = trainer_cards or 2
        servers = []
        with room(options, 0) as place:
            start = models.reseeded(GOLDENS / "llama", place / "start", 4)
            try:
                for flags, env in engines_of(options, start, ranks, trainer_cards):
                    servers.append(Server(start, *flags, env=env))
                before = servers[0].checksums()
                urls = [
                    "--url",
                    servers[0].url,
                    *(flag for server in servers[1:] for flag in ("--and-url", server.url)),
                ]
                arguments = [
                    *urls,
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
                    *(["--bucketed"] if bucketed else []),
                ]
                visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(trainer_cards)))} if on_card(options) else {}
                said = run_trainers(ROOT / "examples/trainers/broadcast_style.py", trainers, arguments, visible)
                check("step 2: updated" in said, said[-500:])
                trained = payloads.checksums_of(safetensors.torch.load_file(place / "end/model.safetensors").items())
                for server in servers:
                    got = server.checksums()
                    wrong = [name for name in trained if got.get(name) != trained[name]]
                    check(
                        got.keys() == trained.keys() and not wrong,
                        f"{len(wrong)} of {len(trained)} tensors are not the trainer's: {wrong[:8]}",
                    )
                    still = [name for name in before if before[name] == got[name] and "norm" not in name]
                    check(not still, f"not trained: {still[:5]}")
                    check(server.get("/get_weight_version")["weight_version"] == "step-2", "the label did not move")
                    check(len(server.generate([[5, 6, 7]], 4)[0][0]) == 4, "it does not generate")
            except BaseException as error:
                for server in servers:
                    error.add_note(f"a server's log ends with\n{server.tail()}")
                    server.kill()
                raise
            for server in servers:
                server.stop()
        return f"{trainers} trainer(s) on {trainer_cards or 'no'} cards, engines of {ranks} ranks"

    return run


test("distributed/examples/one-engine", limit_s=120)(example([1], False))
test("distributed/examples/tp2-bucketed", limit_s=120)(example([2], True))
test("distributed/examples/two-engines", limit_s=120)(example([1, 1], True))
