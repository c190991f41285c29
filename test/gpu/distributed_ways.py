"""Weights that torch trainers broadcast in process groups: every architecture, both formats, engines of one and two
ranks, two engines."""

import concurrent.futures
import random

import models
from distributed_group import DESTROY, INIT, Group, Watch
from distributed_setup import (
    GOLDENS,
    KIND,
    LARGE,
    drop_trainers,
    group_of,
    holds,
    places,
    server_of,
    shapes_in,
    spoil,
    trainers_on,
)
from harness import Skip, check, test
from machine import cards, room
from server import Refused
from tensor_setup import Problems, on_card

WAYS = ["each", "bucket", "one-by-one"]


def there_and_back(group, sums, ways=WAYS):
    for way in ways:
        spoil(group)
        for step, variant in enumerate([1, 2, 1]):
            replies = group.update(variant, way=way, weight_version=f"{way}-{step}").ok().replies
            reply = replies["a"]
            check(
                reply["message"] == f"Succeeded to update parameter online. Weight version updated to {way}-{step}.",
                f"{reply}",
            )
            holds(group, sums[variant], variant, f"{way}, step {step}")
            for letter, reply in replies.items():
                went_in_place(group, letter, reply, way)


def went_in_place(group, letter, reply, way):
    """Sent one by one, every tensor goes straight into an engine of one rank. For buckets of small models it depends on
    the alignment of memory."""
    report = reply["report"]
    if group.backend == "gloo":
        check("bytes_in_place" in report and report["bytes_in_place"] == 0, f"{report}")
    elif group.layout.count(letter) == 1 and way != "bucket":
        check(report["bytes_in_place"] == report["bytes"], f"{report}")


def sums_of(group, variants=(1, 2)):
    return {variant: group.trainers[0]("sums", variant=variant) for variant in variants}


def in_layout(layout):
    def run(options):
        group = group_of(options, layout)
        sums = sums_of(group)
        for reply in group.join().replies.values():
            check(reply["message"] == "Succeeded to initialize custom process group.", f"{reply}")
        there_and_back(group, sums)
        check(
            all(len(server.generate([[5, 6, 7]], 4)[0][0]) == 4 for server in group.engines.values()),
            "it does not generate",
        )
        group.leave()
        return f"{group.backend}, {len(group.shapes)} tensors, {len(WAYS)} ways"

    return run


for layout in ["ta", "taa", "tab", "tat", "taab", "tabt"]:
    test(f"distributed/ways/{layout}", limit_s=120)(in_layout(layout))


def architecture(kind):
    def run(options):
        group = group_of(options, "ta", GOLDENS / kind)
        sums = sums_of(group)
        group.join()
        there_and_back(group, sums, ["each", "bucket"])
        names = list(group.shapes)
        random.Random(options.seed).shuffle(names)
        spoil(group)
        for name in names:
            group.update(2, [name], flush_cache=False).ok()
        holds(group, sums[2], 2, "one request for each tensor, shuffled")
        group.leave()

    return run


for kind in ["llama", "qwen2", "qwen3-moe"]:
    test(f"distributed/architecture/{kind}", limit_s=90)(architecture(kind))


@test("distributed/real-size", real=True)
def real(options):
    """Billions of elements, in one request and in buckets, with staging that is smaller than the request."""
    notes = []
    for layout in ["ta", "taa"]:
        try:
            places(layout, options)
        except Skip as reason:
            notes.append(str(reason))
            continue
        with room(options, 0) as place:
            folder = models.hollow(place / "model", models.REAL["qwen2.5-1.5b"])
            group = group_of(options, layout, folder, timeout_s=120)
            sums = sums_of(group)
            group.join()
            for variant, way in [(1, "bucket"), (2, "each"), (1, "each"), (2, "bucket")]:
                outcome = group.update(variant, way=way).ok()
                holds(group, sums[variant], variant, f"{layout}, {way}")
                notes.append(
                    f"{layout} {way}: trainer {outcome.trainers[0]['seconds'] * 1000:.0f} ms, "
                    f"{outcome.replies['a'].get('report', {}).get('ms')}"
                )
            names, buckets = list(group.shapes), 7
            for index in range(buckets):
                group.update(1, names[index::buckets], "bucket", flush_cache=False).ok()
            holds(group, sums[1], 1, f"{layout}, {buckets} buckets")
            group.leave()
            for server in group.engines.values():
                server.stop()
            drop_trainers(group)
    return "; ".join(notes)


@test("distributed/in-place", gpu=True, limit_s=150)
def in_place(options):
    """A bucket in the model's order goes straight into the weights and needs no GPU memory; with --staged-broadcasts it
    is staged."""
    places("ta", options)
    with room(options, 0) as place:
        folder = models.hollow(place / "model", LARGE)
        names, size = [name for name, _ in models.tensors(LARGE)], models.size(models.tensors(LARGE))
        for flags, expected in [((), size), (("--staged-broadcasts",), 0)]:
            group = group_of(options, "ta", folder, flags=flags)
            sums = sums_of(group)
            group.join()
            for variant, way in [(1, "bucket"), (2, "each"), (1, "bucket")]:
                report = group.update(variant, names, way).ok().replies["a"]["report"]
                check(report["bytes"] == size and report["bytes_in_place"] == expected, f"{flags}, {way}: {report}")
                holds(group, sums[variant], variant, f"{flags}, {way}")
            turned = [names[1], names[0], *names[2:]]
            report = group.update(2, turned, "bucket").ok().replies["a"]["report"]
            check(report["bytes_in_place"] == 0, f"another order: {report}")
            holds(group, sums[2], 2, f"{flags}, another order")
            group.leave()
            for server in group.engines.values():
                server.stop()
            drop_trainers(group)


@test("distributed/gloo-into-a-card", gpu=True, limit_s=90)
def gloo(options):
    """A trainer on the CPU, an engine on a GPU: gloo's bytes go through host memory."""
    shapes = shapes_in(GOLDENS / KIND)
    server = server_of(options, GOLDENS / KIND, "g", 1, cards() - 1)
    group = Group("ta", {"a": server}, trainers_on(["cpu 0"], shapes), shapes, backend="gloo")
    sums = sums_of(group)
    group.join()
    there_and_back(group, sums)
    group.leave()


@test("distributed/refused-and-received", limit_s=90)
def refused(options):
    """A refused update is received first, so the next update needs no new group."""
    group, problems = group_of(options, "ta"), Problems()
    sums = sums_of(group)
    group.join()
    group.update(1).ok()
    names = list(group.shapes)
    odd = names[3]
    wrong = [group.shapes[odd][0] + 1, *group.shapes[odd][1:]]
    renamed = ["nobody" if name == odd else name for name in names]
    cases = {
        "an unknown name": dict(body=lambda body: {**body, "names": renamed}),
        "another shape": dict(announce={odd: ("bfloat16", wrong)}, sent=dict(instead={odd: wrong})),
        "a tensor twice": dict(names=[*names, names[0]]),
    }
    for way in ["each", "bucket"]:
        for case, told in cases.items():

            def work():
                arguments = dict(told)
                outcome = group.update(2, arguments.pop("names", names), way, **arguments)
                check(outcome.refusal().status == 400, f"{outcome.refusal()}")
                stuck = [result for result in outcome.trainers if isinstance(result, Exception)]
                check(not stuck, f"its broadcasts were not taken: {stuck}")
                holds(group, sums[1], 1, case)

            problems(f"{case}, {way}", work, group.engines["a"])
    group.update(2).ok()
    holds(group, sums[2], 2, "afterwards")
    group.leave()
    problems.end()


@test("distributed/two-groups-at-once", limit_s=120)
def two_groups(options):
    """As with a group per pipeline stage: two trainers send half of the weights each to one engine, at the same
    time."""
    if on_card(options) and cards() < 3:
        raise Skip(f"NOT TRIED: two trainers and an engine need 3 cards, and there are {cards()}")
    shapes = shapes_in(GOLDENS / KIND)
    first = group_of(options, "ta", name="slime-pp_0")
    second_trainer = trainers_on(["cuda:2" if on_card(options) else "cpu 1"], shapes)
    stages = [first, Group("ta", first.engines, second_trainer, shapes, name="slime-pp_1", backend=first.backend)]
    sums, names = sums_of(first), list(first.shapes)
    halves = [names[::2], names[1::2]]
    for group in stages:
        group.join()
    spoil(first)
    for variant, way in [(1, "each"), (2, "bucket"), (1, "bucket"), (2, "each")]:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            outcomes = list(
                pool.map(lambda stage: stages[stage].update(variant, halves[stage], way, flush_cache=False), range(2))
            )
        for outcome in outcomes:
            outcome.ok()
        holds(first, sums[variant], variant, f"two groups, {way}")
    first.leave()
    stages[1].update(1, halves[1]).ok()
    stages[1].leave()


@test("distributed/one-card-for-both", gpu=True, limit_s=60)
def one_card(options):
    """NCCL refuses two ranks on one GPU: the error is reported before any rank hangs, and the server lives."""
    shapes = shapes_in(GOLDENS / KIND)
    server = server_of(options, GOLDENS / KIND, "s", 1, 0)
    group = Group("ta", {"a": server}, trainers_on(["cuda:0"], shapes), shapes, backend="nccl", timeout_s=20)
    with Watch(server):
        arguments = dict(
            group=group.name, address=group.address, port=group.port, world=2, backend="nccl", timeout_s=20
        )
        group.begin_trainers("join", **arguments)
        said = group.post(INIT, {"a": group.place("a")})["a"].result()
        if not isinstance(said, Refused):
            # It is unknown until the trainer's side of the communicator is made.
            group.end_trainers()
            group.prepare(1)
            asked = group.announce(list(group.shapes))
            group.begin_send()
            said = asked["a"].result()
    drop_trainers(group)
    check(
        isinstance(said, Refused) and "GPU" in said.body and "/update_weights_from_tensor" in said.body,
        f"trainer and engine on one card: {said}",
    )
    group.post(DESTROY, {"a": dict(group_name=group.name)})["a"].result()
    check(len(server.generate([[5, 6, 7]], 4)[0][0]) == 4, "it does not generate")
    return str(said)


@test("distributed/while-it-generates", limit_s=90)
def generating(options):
    """Rollouts continue while the server waits for a trainer; then the update runs, and every reply names its
    weights."""
    group = group_of(options, "ta")
    server, sums = group.engines["a"], sums_of(group)
    group.join()
    group.update(1, weight_version="one").ok()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        body = dict(input_ids=[5, 6], sampling_params=dict(max_new_tokens=200, ignore_eos=True))
        for step in range(4):
            server.post("/pause_generation", dict(mode="in_place")) if step % 2 else None
            rollout = pool.submit(server.post, "/generate", body, 60)
            group.update(1 + step % 2, weight_version=f"step-{step}").ok()
            server.post("/continue_generation") if step % 2 else None
            check(len(rollout.result(60)["output_ids"]) == 200, "a rollout ended early")
            holds(group, sums[1 + step % 2], 1 + step % 2, f"step {step}")
    check(server.generate([[5, 6]], 2) is not None, "it does not generate")
    group.leave()


def unknown_library(options):
    """A missing library is reported at init, with the places that were searched."""
    server = server_of(options, GOLDENS / KIND, "x", 1, cards() - 1, "--nccl-path", "/nowhere/libnccl.so.2")
    try:
        server.post(
            INIT,
            dict(
                master_address="127.0.0.1", master_port=1, rank_offset=1, world_size=2, group_name="x", backend="nccl"
            ),
            timeout=60,
        )
        said = None
    except Refused as error:
        said = error
    server.stop()
    check(said is not None and "/nowhere/libnccl.so.2" in said.body, f"{said}")
    return str(said)


test("distributed/no-such-library", gpu=True, limit_s=60)(unknown_library)
