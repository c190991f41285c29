"""Groups whose trainers die, stop, come late or announce other sizes than they send; and 40 groups in sequence that
leave nothing behind."""

import json
import os
import re
import signal
import time

import models
from distributed_group import DESTROY, INIT, Watch, free_port
from distributed_setup import DEADLINE_S, LARGE, drop_trainers, group_of, heals, holds, places, state_after
from harness import check, test
from machine import free_on_card, room
from server import Refused
from tensor_process import footprint
from tensor_setup import Problems, on_card

# The servers' deadline, and the time of the rest of a reply.
LIMIT_S = DEADLINE_S + 6
SMALL = dict(
    LARGE,
    hidden_size=1024,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=64,
    intermediate_size=3072,
    vocab_size=24576,
)


def words_of(refusal, what, *expected):
    check(isinstance(refusal, Refused), f"{what}: it was to be refused, and was answered {str(refusal)[:300]}")
    message = json.loads(refusal.body)["message"]
    missing = [word for word in expected if word not in message]
    check(
        not missing and re.search(r"\d+(\.\d+)? ?(ms|s)\b", message),
        f"{what}: the message has no {missing or 'elapsed time'}: {message}",
    )
    return message


def in_mid_broadcast(options, layout, fault, shares, way="each", flags=()):
    places(layout, options)
    notes, problems = [], Problems()
    with room(options, 0) as place:
        folder = models.hollow(place / "model", LARGE if on_card(options) else SMALL)
        port, sums, server = free_port(), None, None
        for share in shares:

            def work():
                nonlocal sums, server
                group = group_of(options, layout, folder, flags, name="mid", port=port)
                server = group.engines["a"]
                sums = sums or {variant: group.trainers[0]("sums", variant=variant) for variant in (1, 2)}
                group.join()
                group.update(1).ok()
                names = list(group.shapes)
                usual = group.update(1, names, way).ok().trainers[0]["seconds"]
                sender = group.trainers[0]
                group.prepare(2, names, way)
                with Watch(server):
                    began = time.monotonic()
                    asked = group.announce(names, way, weight_version="never")
                    group.begin_send(share * usual, fault)
                    replies = {letter: reply.result() for letter, reply in asked.items()}
                    took = time.monotonic() - began
                os.kill(sender.pid, signal.SIGCONT)
                drop_trainers(group)
                states = {
                    letter: state_after(server, sums[1], sums[2], fault) for letter, server in group.engines.items()
                }
                for letter, reply in replies.items():
                    if isinstance(reply, Exception):
                        notes.append(
                            f"{share} of {usual:.3f} s: {took:.1f} s, {states[letter]}: "
                            f"{words_of(reply, fault, 'mid')[:400]}"
                        )
                        check(states[letter] != "new", f"refused, and the weights are new: {reply}")
                        # A staged piece was not written.
                        check(
                            not flags or states[letter] == "old",
                            f"staged, and the weights are {states[letter]}: {reply}",
                        )
                    else:
                        check(states[letter] == "new", f"it said 200, and the weights are {states[letter]}")
                        notes.append(f"{share} of {usual:.3f} s: too late, 200")
                check(took < LIMIT_S, f"it took {took:.1f} s, and the deadline is {DEADLINE_S} s")
                group.close()
                heals(options, layout, "mid", port, sums[1], 1, folder, flags)

            problems(f"{fault} at {share} of a broadcast", work, server)
        if server is not None and server.process.poll() is None:
            problems("its end", server.stop, server)
    problems.end()
    return "; ".join(notes)


for fault in ["SIGKILL", "SIGSTOP"]:
    test(f"distributed/mid-broadcast/{fault}", limit_s=200)(
        lambda options, fault=fault: in_mid_broadcast(options, "ta", fault, [0.0, 0.3, 0.7])
    )
test("distributed/mid-broadcast/staged", limit_s=150)(
    lambda options: in_mid_broadcast(options, "ta", "SIGKILL", [0.3], "bucket", ["--staged-broadcasts"])
)
test("distributed/mid-broadcast/two-ranks", limit_s=150)(
    lambda options: in_mid_broadcast(options, "taa", "SIGKILL", [0.3])
)


@test("distributed/late-and-never", limit_s=120)
def late(options):
    """A trainer that is late within the deadline, one that is later, and one that never opens its store. The server
    answers all the time."""
    notes, problems, port = [], Problems(), free_port()
    group = group_of(options, "ta", name="late", port=port)
    server = group.engines["a"]
    sums = {variant: group.trainers[0]("sums", variant=variant) for variant in (1, 2)}
    names = list(group.shapes)

    def within():
        with Watch(server):
            group.join(trainers_first=False, pause_s=1)
            group.prepare(1)
            asked = group.announce(names)
            time.sleep(2)
            check(
                len(server.generate([[5, 6]], 4)[0][0]) == 4 and not asked["a"].done(),
                "an awaited trainer holds up generation",
            )
            group.begin_send()
            group.end_trainers()
        check(not isinstance(asked["a"].result(), Exception), f"{asked['a'].result()}")
        holds(group, sums[1], 1, "two seconds late")

    def too_late():
        began = time.monotonic()
        with Watch(server):
            said = group.announce(names)["a"].result()
        took = time.monotonic() - began
        notes.append(f"{took:.1f} s: {words_of(said, 'too late', 'late')}")
        check(DEADLINE_S - 1 < took < LIMIT_S, f"it took {took:.1f} s")
        notes.append(state_after(server, sums[1], sums[2], "too late"))
        drop_trainers(group)
        heals(options, "ta", "late", port, sums[2], 2)

    def never():
        began = time.monotonic()
        with Watch(server):
            said = group.post(INIT, {"a": {**group.place("a"), "master_port": free_port()}})["a"].result()
        took = time.monotonic() - began
        notes.append(f"{took:.1f} s: {words_of(said, 'never', 'late')}")
        check(took < LIMIT_S, f"it took {took:.1f} s")
        heals(options, "ta", "late", port, sums[1], 1)

    for what, work in dict(within=within, too_late=too_late, never=never).items():
        problems(what, work, server)
    problems.end()
    return "; ".join(notes)


@test("distributed/more-announced-than-sent", limit_s=90)
def lies(options):
    """The rest never arrives: the deadline ends the update, and torn tensors are named."""
    group = group_of(options, "ta", name="lies")
    sums = {variant: group.trainers[0]("sums", variant=variant) for variant in (1, 2)}
    group.join()
    group.update(1).ok()
    names, server = list(group.shapes), group.engines["a"]
    group.prepare(2, names[:-1])
    with Watch(server):
        began = time.monotonic()
        asked = group.announce(names)
        group.begin_send()
        said = asked["a"].result()
        took = time.monotonic() - began
    drop_trainers(group)
    message = words_of(said, "a tensor less", "lies", names[-1])
    check(took < LIMIT_S, f"it took {took:.1f} s")
    state = state_after(server, sums[1], sums[2], "a tensor less")
    heals(options, "ta", "lies", group.port, sums[2], 2)
    return f"{took:.1f} s, {state}: {message}"


@test("distributed/more-sent-than-announced", limit_s=120)
def larger(options):
    """A bucket that is larger than announced: the parameters behind the announced ones stay as they are."""
    places("ta", options)
    with room(options, 0) as place:
        folder = models.hollow(place / "model", LARGE if on_card(options) else SMALL)
        group = group_of(options, "ta", folder, name="larger")
        sums = {variant: group.trainers[0]("sums", variant=variant) for variant in (1, 2)}
        group.join()
        group.update(1).ok()
        names, server = list(group.shapes), group.engines["a"]
        half = names[: len(names) // 2]
        group.prepare(2, names, "bucket")
        with Watch(server):
            asked = group.announce(half, "bucket")
            group.begin_send()
            said = asked["a"].result()
        drop_trainers(group)
        got = server.checksums()
        others = [name for name in names[len(half) :] if got[name] != sums[1][name]]
        check(
            not others,
            f"{len(others)} tensors changed that were not announced: {others[:5]}; the update was answered "
            f"{str(said)[:300]}",
        )
        heals(options, "ta", "larger", group.port, sums[2], 2, folder)
        return str(said)[:200]


@test("distributed/left-alone", limit_s=90)
def left_alone(options):
    """The engine leaves and the trainer does not: neither waits for the other."""
    group = group_of(options, "ta", name="alone")
    sums = {variant: group.trainers[0]("sums", variant=variant) for variant in (1, 2)}
    group.join()
    group.update(1).ok()
    server = group.engines["a"]
    with Watch(server):
        began = time.monotonic()
        server.post(DESTROY, dict(group_name="alone"), timeout=30)
        check(len(server.generate([[5, 6]], 4)[0][0]) == 4, "it does not generate")
        took = time.monotonic() - began
    check(took < 10, f"it took {took:.1f} s")
    holds(group, sums[1], 1, "after it has left")
    # The trainer can leave later, and join again.
    began = time.monotonic()
    group.leave(engines=False)
    alone = time.monotonic() - began
    group.join()
    group.update(2).ok()
    holds(group, sums[2], 2, "after both came again")
    group.leave()
    return f"the engine left in {1000 * took:.0f} ms, the trainer after it in {1000 * alone:.0f} ms"


def settled_footprint(server, first_card, ranks, options):
    """The resources of an idle server."""
    time.sleep(0.5)
    found = footprint(server.process.pid)
    return dict(
        found,
        card_mb=[round((free_on_card(first_card + rank)) / 1e6) for rank in range(ranks)] if on_card(options) else [],
    )


def forty_rounds(layout):
    def run(options):
        places(layout, options)
        rounds = 40 if on_card(options) or not options.small else 10
        group = group_of(options, layout, name="again")
        sums = {variant: group.trainers[0]("sums", variant=variant) for variant in (1, 2)}
        before, inits, destroys = None, [], []
        for number in range(rounds + 4):
            if number == 4:
                # The first round allocates what is allocated once.
                before = settled_footprint(group.engines["a"], 1, layout.count("a"), options)
                trainer_before = group.trainers[0]("memory")
            began = time.monotonic()
            group.join()
            inits.append(time.monotonic() - began)
            for variant, way in [(1 + number % 2, "each"), (2 - number % 2, "bucket")]:
                group.update(variant, way=way).ok()
            holds(group, sums[variant], variant, f"round {number}")
            began = time.monotonic()
            group.leave()
            destroys.append(time.monotonic() - began)
        after = settled_footprint(group.engines["a"], 1, layout.count("a"), options)
        trainer_after = group.trainers[0]("memory")
        said = (
            f"the server before {before}, after {rounds} rounds {after}; the trainer's own {trainer_before} and "
            f"{trainer_after}"
        )
        for key, slack in [
            ("descriptors", 2),
            ("threads", 0),
            ("device_mappings", 4),
            ("mappings", 150),
            ("resident_mb", 150),
        ]:
            check(after[key] - before[key] <= slack, f"{key} grew: {said}")
        for old, new in zip(before["card_mb"], after["card_mb"]):
            check(old - new <= 32, f"free memory of a card shrank: {said}")
        middle = sorted(inits)[len(inits) // 2], sorted(destroys)[len(destroys) // 2]
        return f"init {1000 * middle[0]:.0f} ms, destroy {1000 * middle[1]:.0f} ms (medians, both sides); {said}"

    return run


test("distributed/40-rounds/ta", limit_s=300)(forty_rounds("ta"))
test("distributed/40-rounds/taa", limit_s=300)(forty_rounds("taa"))


@test("distributed/engine-killed", limit_s=120)
def engine_killed(options):
    """Another engine of the group dies; this one reports it, and continues in a new group."""
    places("tab", options)
    group = group_of(options, "tab", name="peer")
    sums = {variant: group.trainers[0]("sums", variant=variant) for variant in (1, 2)}
    group.join()
    group.update(1).ok()
    names, server = list(group.shapes), group.engines["a"]
    group.prepare(2)
    with Watch(server):
        asked = group.announce(names)
        group.engines["b"].kill()
        time.sleep(0.2)
        group.begin_send()
        said = asked["a"].result()
    drop_trainers(group)
    state = state_after(server, sums[1], sums[2], "an engine died")
    # The trainer may have sent everything to this engine: then it has the new weights, and replies 200.
    if isinstance(said, Exception):
        check(state != "new", f"refused, and the weights are new: {said}")
        words_of(said, "an engine died", "peer")
    else:
        check(state == "new", f"it said 200, and the weights are {state}")
    group.post(DESTROY, {"a": dict(group_name="peer")})["a"].result()
    heals(options, "ta", "peer", group.port, sums[2], 2)
    return f"{state}: {str(said)[:300]}"
