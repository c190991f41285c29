"""When memory is freed: senders that die, free, overwrite or repeat themselves, and 500 updates that leave nothing
behind."""

import concurrent.futures
import pathlib
import time

from harness import check, test
from machine import cards, free_on_card, settled
from server import Refused
from tensor_process import Process, footprint, shared_files
from tensor_setup import (
    PATH,
    Problems,
    check_closed,
    check_given_back,
    check_sums,
    on_card,
    opened_and_closed,
    post,
    refusal,
    sender_of,
    server_of,
    servers,
    shapes_of,
)

KIND = "qwen3"


@test("tensor/freed-right-after-the-reply", limit_s=60)
def freed(options):
    """A sender overwrites all that it sent as soon as it is answered; another time it frees it and allocates again."""
    shapes = shapes_of(KIND)
    for ranks in [1, 2]:
        server, sender = server_of(options, KIND, ranks), sender_of(options, KIND)
        sums = {variant: sender("sums", variant=variant) for variant in range(8)}
        sender("make", variant=0)
        for variant in range(1, 8):
            sender("fill", variant=variant)
            post(server, sender("pack", way=["list", "bucket"][variant % 2], ranks=ranks))
            sender("spoil")
            check_sums(server, sums[variant], variant, shapes, f"overwritten, tp {ranks}, variant {variant}")
        for variant in range(1, 8):
            sender("make", variant=variant)
            post(server, sender("pack", way=["list", "verl", "bucket"][variant % 3], ranks=ranks))
            sender("drop")
            sender("make", variant=0)
            check_sums(server, sums[variant], variant, shapes, f"freed, tp {ranks}, variant {variant}")
        check_given_back(sender, "freed")
        check_closed(server, "freed")
        sender("drop")


def busy(server):
    """A rollout that delays the gate for a while; returns the function that ends it."""
    pool = concurrent.futures.ThreadPoolExecutor(1)
    body = dict(input_ids=[5], sampling_params=dict(max_new_tokens=480, ignore_eos=True), rid="keeps-the-gate")
    before = server.metric("refit:generation_tokens_total")
    rollout = pool.submit(server.post, "/generate", body)
    settled(lambda: server.metric("refit:generation_tokens_total"), lambda count: count > before, 10)
    return rollout


@test("tensor/the-same-body-at-once", limit_s=60)
def same_body(options):
    """Three equal requests at the same time are one update, and every reference is released once."""
    shapes = shapes_of(KIND)
    server, sender = server_of(options, KIND, 1), sender_of(options, KIND)
    sender("make", variant=6)
    sums = sender("sums", variant=6)
    (body,) = sender("pack", way="list", ranks=1)
    epoch = server.metric("refit:weight_epoch")
    rollout = busy(server)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        replies = list(pool.map(lambda _: server.post(PATH, {**body, "weight_version": "six"}, timeout=60), range(3)))
    rollout.result(60)
    moved = server.metric("refit:weight_epoch") - epoch
    check(moved == 1, f"{moved:.0f} updates were made of three equal bodies at once (did the rollout end too soon?)")
    check(all(reply == replies[0] for reply in replies), f"they were answered differently: {replies}")
    check_sums(server, sums, 6, shapes, "three times")
    check_given_back(sender, "three times")
    # Once it has ended, its references are gone: the sender may have freed the memory.
    sender("drop")
    try:
        server.post(PATH, body, timeout=60)
        said = "taken"
    except Refused as error:
        said = f"refused ({error.status})"
    check(
        server.checksums() == sums or said == "taken",
        f"a body whose memory is gone was {said}, and the weights changed",
    )
    check_closed(server, "three times")
    server.post("/weights_checker", dict(action="reset_tensors"))
    sender("make", variant=6)
    post(server, sender("pack", way="list", ranks=1))
    check_sums(server, sums, 6, shapes, "afterwards")
    return f"a body whose memory the sender has freed is {said}"


def state_after(server, sums, old, what):
    """The state of the weights in one word; fails if they are neither old, nor new, nor reported as torn."""
    torn = server.metric("refit:weights_torn") == 1
    got = server.checksums()
    if torn:
        return "torn, and says so"
    check(got in (sums, old), f"{what}: weights that are neither old nor new, and not called torn")
    return "new" if got == sums else "old"


@test("tensor/killed-senders", limit_s=120)
def killed(options):
    """A sender that dies before its request, while it waits in the queue, and after the reply."""
    shapes, notes, problems = shapes_of(KIND), [], Problems()
    names = ["before", "during", "after"] + (["while its stream is waited for"] if on_card(options) else [])
    processes = {name: Process() for name in names}
    try:
        for sender in processes.values():
            # Started together, because each takes seconds to load torch.
            sender.begin(
                "start",
                device="cuda:0" if on_card(options) else "cpu",
                devices=["cuda:0" if on_card(options) else "cpu"],
                config={},
                shapes=shapes,
            )
        for sender in processes.values():
            sender.end()
        sums = processes["after"]("sums", variant=7)

        def healthy(what):
            """The same server takes the next update."""
            server, other = server_of(options, KIND, 1), sender_of(options, KIND)
            other("make", variant=8)
            post(server, other("pack", way="list", ranks=1))
            check_sums(server, other("sums", variant=8), 8, shapes, f"the update after ({what})")
            check_given_back(other, what)
            other("drop")
            check_closed(server, what)
            return server.checksums()

        def prepared(name):
            sender = processes[name]
            sender("make", variant=7)
            (body,) = sender("pack", way="list", ranks=1)
            return sender, body

        def before():
            server = server_of(options, KIND, 1)
            old = healthy("before")
            sender, body = prepared("before")
            sender.kill()
            # Its memory is reclaimed: GPU memory by the driver, files by torch's own manager.
            time.sleep(0.5)
            if not on_card(options):
                settled(lambda: shared_files(sender.pid), lambda files: not files)
            error = refusal(server, body)
            check(server.checksums() == old, f"refused, and the weights changed: {error}")
            check(
                "sender" in str(error) or "ended" in str(error),
                f"the refusal does not say that the sender is gone: {error}",
            )
            notes.append(f"before: {error}")
            healthy("after a dead sender's request")

        def during():
            server = server_of(options, KIND, 1)
            old = healthy("during")
            sender, body = prepared("during")
            rollout = busy(server)
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                request = pool.submit(server.post, PATH, body, 60)
                time.sleep(0.05)
                sender.kill()
                try:
                    said = f"taken ({request.result(90)['message']})"
                except Refused as error:
                    said = f"refused ({error})"
            rollout.result(60)
            state = state_after(server, sums, old, said)
            check((state == "new") == said.startswith("taken"), f"{said}, and the weights are {state}")
            notes.append(f"during: {said}, weights {state}")
            healthy("after a sender died in its request")

        def after():
            server = server_of(options, KIND, 1)
            sender, body = prepared("after")
            post(server, [body])
            sender.kill()
            time.sleep(0.3)
            check_sums(server, sums, 7, shapes, "after its sender died")
            check(len(server.generate([[5, 6, 7]], 8)[0][0]) == 8, "it does not generate")
            healthy("after a sender ended")

        def waited_for():
            server = server_of(options, KIND, 1)
            old = healthy("waited for")
            sender = processes["while its stream is waited for"]
            sender("make", variant=0)
            late = sender("pack_late", variant=7, ranks=1, seconds=3)
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                request = pool.submit(server.post, PATH, late["requests"][0], 90)
                time.sleep(1)
                answered = request.done()
                sender.kill()
                try:
                    said = f"taken ({request.result(100)['message']})"
                except Refused as error:
                    said = f"refused ({error})"
                except OSError as error:
                    said = f"not answered ({error})"
                    settled(lambda: server.process.poll(), lambda code: code is not None, 5)
            check(not answered, f"answered while its stream was still at work: {said}")
            if server.process.poll() is not None:
                notes.append(
                    f"while waited for: {said}; THE SERVER ENDED with {server.process.returncode}: {server.tail(3)}"
                )
            else:
                got = server.checksums()
                state = (
                    "new"
                    if got == sums
                    else "old"
                    if got == old
                    else "torn, and says so"
                    if server.metric("refit:weights_torn")
                    else "what the sender had when it died"
                )
                notes.append(f"while waited for: {said}, weights are {state}")
            healthy("after a sender died under its stream")

        for name, run in dict(before=before, during=during, after=after, waited_for=waited_for).items():
            if name != "waited_for" or on_card(options):
                problems(name, run, servers.get((KIND, 1)))
    finally:
        for sender in processes.values():
            sender.kill()
    problems.end()
    return "; ".join(notes)


def free_everywhere():
    return [free_on_card(i) for i in range(cards())]


@test("tensor/500-updates", limit_s=140)
def five_hundred(options):
    """In several formats, every seventh refused (200 updates with --small). Memory of GPUs and host, descriptors,
    mappings and threads do not grow."""
    shapes, notes, problems = shapes_of(KIND), [], Problems()
    rounds = 50 if options.device == "cpu" else 200 if options.small else 500
    for ranks, name in [(1, "plain"), (2, "plain")] + (
        [(1, "expandable")] if on_card(options) and not options.small else []
    ):
        what = f"tp {ranks}, {name}"

        def work():
            server, sender = server_of(options, KIND, ranks), sender_of(options, KIND, name)
            sums = sender("sums", variant=1)
            ways = ["list", "bucket", "verl", "list-per-rank"] if name == "plain" else ["list", "bucket"]
            count = rounds if name == "plain" else rounds // 5
            # The first round allocates what is allocated once.
            sender("loop", port=server.port, count=28, ways=ways, ranks=ranks)
            sender("forget")
            # A server's thread for large bodies is started when it has run for a second (src/app/plugin.ts).
            time.sleep(1.5)
            before = dict(
                sender=sender("memory"),
                server=footprint(server.process.pid),
                card=free_everywhere() if on_card(options) else [],
            )
            files = set(shared_files(sender.pid))
            began = time.monotonic()
            sender.begin("loop", port=server.port, count=count, ways=ways, ranks=ranks)
            sender.end(120)
            seconds = time.monotonic() - began
            after = dict(
                sender=sender("memory"),
                server=footprint(server.process.pid),
                card=free_everywhere() if on_card(options) else [],
            )
            check_sums(server, sums, 1, shapes, what)
            check_closed(server, what)
            # Within the variation of an allocator, for this process and all mappings of GPUs.
            for who, key, slack in [
                ("sender", "allocated", 0),
                ("sender", "reserved", 0),
                ("sender", "descriptors", 1),
                ("sender", "threads", 1),
                ("sender", "mappings", 8),
                ("server", "descriptors", 2),
                ("server", "threads", 1),
                ("server", "mappings", 150),
                ("server", "device_mappings", 4),
                ("server", "resident_mb", 250),
            ]:
                old, new = before[who].get(key, 0), after[who].get(key, 0)
                check(
                    new - old <= slack,
                    f"{what}: {key} of the {who}: {old} before, {new} after {count} updates; all: {before} and {after}",
                )
            for card, (old, new) in enumerate(zip(before["card"], after["card"])):
                check(
                    abs(new - old) <= 16 << 20,
                    f"{what}: free on card {card}: {old / 1e6:.0f} MB before, {new / 1e6:.0f} after {count} updates; "
                    f"all: {before} and {after}",
                )
            shares = sender("shares")
            check(
                set(shares["left"]) <= {"0", "gone"}, f"{what}: counters of {shares['count']} shares: {shares['left']}"
            )
            new = sorted(set(shared_files(sender.pid)) - files)
            check(len(new) <= 4, f"{what}: {len(new)} files of shared memory are left: {new[:6]}")
            notes.append(
                f"{len(files)} files of shared memory before, of "
                f"{sorted({pathlib.Path(file).stat().st_size for file in files})} bytes"
            )
            grown = {key: after["server"][key] - before["server"][key] for key in after["server"]}
            notes.append(
                f"{what}: {count} in {seconds:.1f} s, {shares['count']} shares, {opened_and_closed(server)}, the "
                f"server grew by {grown}"
            )
            sender("drop")

        problems(what, work, servers.get((KIND, ranks)))
    problems.end()
    return "; ".join(notes)
