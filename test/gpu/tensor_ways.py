"""Weights from the memory of torch processes: every architecture, every form that trainers send, every kind of
memory."""

import time

import tensor_payloads as payloads
from harness import Skip, check, test, wanted
from machine import cards
from server import Refused
from tensor_process import Process
from tensor_setup import (
    Problems,
    begin,
    check_closed,
    check_given_back,
    check_sums,
    on_card,
    post,
    sender_of,
    server_of,
    servers,
    shapes_of,
    start_ahead,
)

DIRECT = {"llama", "qwen2", "qwen3", "qwen3-moe"}


def there_and_back(server, sender, way, shapes, ranks, sums, variants, fields):
    """Noise first, so no value is right by accident; then every variant."""
    server.post("/weights_checker", dict(action="reset_tensors"))
    for step, variant in enumerate(variants):
        sender("fill", variant=variant)
        reply = post(
            server, sender("pack", way=way, ranks=ranks), flush_cache=False, weight_version=f"{way}-{step}", **fields
        )
        check(
            reply["torn_count"] == 0, f"{way}, variant {variant}: {reply['torn_count']} tensors are torn still: {reply}"
        )
        # The sent memory is overwritten at once, because all of it was copied.
        sender("spoil")
        check_sums(server, sums[variant], variant, shapes, f"{way}, step {step}")
        label = server.get("/get_weight_version")["weight_version"]
        check(label == f"{way}-{step}", f"the label is {label}")


def every_way(kind, ranks):
    def run(options):
        if is_left_out(options, kind, ranks):
            raise Skip("--small: two ranks are tried")
        following = [
            case
            for case in CASES[CASES.index((kind, ranks)) + 1 :]
            if not is_left_out(options, *case) and wanted(f"tensor/ways/{case[0]}-tp{case[1]}", options)
        ]
        server, sender = server_of(options, kind, ranks), sender_of(options, kind)
        # Start the next test's server meanwhile.
        for case in following[:1]:
            start_ahead(options, *case)
        shapes = shapes_of(kind)
        sums = {variant: sender("sums", variant=variant) for variant in (1, 2)}
        sender("make", variant=0)
        problems, ways = Problems(), payloads.WAYS + (payloads.CARD_WAYS if on_card(options) else [])
        for way in ways:
            if way == "direct" and kind not in DIRECT:
                continue
            # One request for each tensor: one variant is enough.
            variants = (1,) if way == "verl-one-by-one" else (1, 2, 1)

            def work():
                there_and_back(server_of(options, kind, ranks), sender, way, shapes, ranks, sums, variants, {})
                check_given_back(sender, way)
                check_closed(server_of(options, kind, ranks), way)

            problems(way, work, servers_now(kind, ranks))
            sender("forget")
        server = server_of(options, kind, ranks)
        generated = server.generate([[5, 6, 7]], 4)
        check(len(generated[0][0]) == 4, f"the engine does not generate: {generated}")
        left = sender("drop")
        check(left.get("allocated", 0) == 0, f"the sender's memory is not free: {left}")
        problems.end(server)
        return f"{len(ways)} ways, {len(shapes)} tensors"

    return run


def servers_now(kind, ranks):
    return servers.get((kind, ranks))


def is_left_out(options, kind, ranks):
    return options.small and ranks == 1 and kind not in ("qwen3", "qwen3-moe")


CASES = [
    (kind, ranks)
    for kind in ["llama", "llama-linear-bias", "qwen2", "qwen3", "qwen3-moe", "qwen3-moe-step2"]
    for ranks in [1, 2]
]
for case in CASES:
    test(f"tensor/ways/{case[0]}-tp{case[1]}", limit_s=75)(every_way(*case))


def forbidden(error):
    """Why this machine does not let one process duplicate another's descriptors, if that was refused."""
    said = {}
    for path in ["/proc/sys/kernel/yama/ptrace_scope"]:
        try:
            with open(path) as file:
                said[path] = file.read().strip()
        except OSError:
            said[path] = "not there"
    with open("/proc/self/status") as file:
        said.update(
            line.split(":\t") for line in file.read().splitlines() if line.startswith(("Seccomp:", "CapEff:", "Uid:"))
        )
    return f"{error}; {said}"


@test("tensor/allocators", gpu=True, limit_s=90)
def allocators(options):
    """The sender's tensors one by one in torch's allocator, as views of a few buffers, and in expandable segments."""
    problems, notes = Problems(), []
    kind, shapes = "qwen3", shapes_of("qwen3")
    for name, place in [
        ("plain", "ordinary"),
        ("plain", "pooled"),
        ("expandable", "ordinary"),
        ("expandable", "pooled"),
    ]:
        for ranks in [1, 2]:
            what = f"{name} {place} tp {ranks}"

            def work():
                server, sender = server_of(options, kind, ranks), sender_of(options, kind, name)
                sums = {variant: sender("sums", variant=variant) for variant in (1, 2)}
                sender("make", variant=0, place=place)
                for way in ["list", "list-by-uuid", "bucket", "verl"]:
                    try:
                        there_and_back(server, sender, way, shapes, ranks, sums, (1, 2, 1), {})
                    except Refused as error:
                        raise AssertionError(f"{way}: {forbidden(error) if name == 'expandable' else error}") from None
                shares = check_given_back(sender, what)
                check_closed(server, what)
                left = sender("drop")
                check(left["allocated"] == 0, f"{what}: the sender's memory is not free: {left}")
                kinds = shares["kinds"]
                check(
                    any("e" in one[2:3] for one in kinds) == (name == "expandable"),
                    f"{what}: its handles are {kinds}: the allocator is not the one that was asked for",
                )
                notes.append(f"{what}: {kinds}")

            problems(what, work, servers_now(kind, ranks))
    problems.end()
    return "; ".join(notes)


@test("tensor/event", gpu=True, limit_s=60)
def event(options):
    """Posted before the sender's stream has written: refit waits for the handle's event, so it reads the written
    values."""
    notes, problems = [], Problems()
    kind, shapes = "qwen3", shapes_of("qwen3")
    for ranks in [1, 2]:

        def work():
            server, sender = server_of(options, kind, ranks), sender_of(options, kind)
            sums = sender("sums", variant=5)
            sender("make", variant=0)
            server.post("/weights_checker", dict(action="reset_tensors"))
            late = sender("pack_late", variant=5, ranks=ranks, seconds=1.5)
            check(late["pending"], "the sender's stream was done before its request was packed: nothing is tested")
            began = time.monotonic()
            post(server, late["requests"])
            took = time.monotonic() - began
            check(sender("is_done"), f"tp {ranks}: answered after {took:.2f} s, before the sender's stream had written")
            check_sums(server, sums, 5, shapes, f"tp {ranks}")
            check(
                took > 0.2,
                f"tp {ranks}: answered after {took:.3f} s: the stream's wait was over before the request came; "
                f"nothing is tested",
            )
            check_given_back(sender, "event")
            notes.append(f"tp {ranks}: answered {took:.2f} s later")

        problems(f"tp {ranks}", work, servers_now(kind, ranks))
    problems.end()
    return "; ".join(notes)


@test("tensor/more-shares-than-events", gpu=True, limit_s=60)
def no_events(options):
    """torch has 1,000 events for its handles. Beyond them it waits itself and marks the handle."""
    server, shapes = server_of(options, "qwen3", 1), shapes_of("qwen3")
    with Process() as sender:
        begin(options, sender, "qwen3")
        sender("make", variant=0)
        sums = sender("sums", variant=3)
        sender("crowd", count=1100)
        there_and_back(server, sender, "list", shapes, 1, {3: sums}, (3,), {})
        left = sender("shares")["left"]
        check(
            left.get("0") == len(shapes) and left.get("1") == 1100,
            f"of 1100 shares that were kept and {len(shapes)} that were sent, counters are {left}",
        )
    check_closed(server, "events")


@test("tensor/other-card", gpu=True, limit_s=60)
def other_card(options):
    """A sender that sees only the last GPU, which it calls 0. A UUID identifies it; an index is the sender's own."""
    if cards() < 2:
        raise Skip("one card: a sender on a card that the engine does not use needs two")
    kind, shapes, notes = "qwen3", shapes_of("qwen3"), []
    server, sender = server_of(options, kind, 1), sender_of(options, kind, "last-card")
    sender("make", variant=0)
    sums = {variant: sender("sums", variant=variant) for variant in (1, 2)}
    there_and_back(server, sender, "list-by-uuid", shapes, 1, sums, (1, 2), {})
    notes.append("by UUID it is read over the link")
    before = server.checksums()
    sender("fill", variant=1)
    try:
        post(server, sender("pack", way="list", ranks=1))
        check_sums(server, sums[1], 1, shapes, "by index")
        notes.append("by index it is read, too")
    except Refused as error:
        check(
            error.status == 400 and server.checksums() == before,
            f"by index: {error}; the weights {'are' if server.checksums() == before else 'ARE NOT'} what they were",
        )
        notes.append(f"by index it is refused: {error}")
    check_given_back(sender, "other card")
    check_closed(server, "other card")
    return "; ".join(notes)
