"""Tensors that stay mapped between requests: refit's `keep` and `kept`."""

from harness import check, test
from machine import settled
from server import Refused
from tensor_process import Process, shared_files
from tensor_setup import (
    SENDERS,
    Problems,
    begin,
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


def name_of(generation):
    return dict(name="the trainer's pool", generation=generation)


def life(options, ranks, name, place):
    server, sender, shapes = server_of(options, KIND, ranks), sender_of(options, KIND, name), shapes_of(KIND)
    sums = {variant: sender("sums", variant=variant) for variant in range(1, 6)}
    server.post("/release_kept_tensors", {})
    before = opened_and_closed(server)
    sender("make", variant=1, place=place)
    server.post("/weights_checker", dict(action="reset_tensors"))
    post(server, sender("pack", way="list", ranks=ranks), keep=name_of(1))
    check_sums(server, sums[1], 1, shapes, "kept")
    check(server.metric("refit:kept_tensor_names") == 1, "nothing is kept")
    opened = opened_and_closed(server)
    left = sum(pair[0] - pair[1] for pair in opened.values())
    check(left > 0, f"nothing is open: {before} before, {opened} with what is kept")
    if on_card(options):
        held = sender("shares")["left"]
        check(held == {"1": len(shapes)}, f"the sender's references must stay as long as its memory is kept: {held}")
    # Other values in the same memory; the request has no handles.
    for round in range(100):
        variant = 2 + round % 3
        if round < 3 or round > 96:
            sender("fill", variant=variant)
        post(server, [dict(kept=name_of(1))], weight_version=f"kept-{round}", flush_cache=False)
        if round < 3 or round > 96:
            check_sums(server, sums[variant], variant, shapes, f"kept, round {round}")
    check(
        opened_and_closed(server) == opened,
        f"a kept mapping was opened or closed: {opened} and {opened_and_closed(server)}",
    )
    # A wrong request is refused, and changes nothing.
    now = server.checksums()
    for body, status in [
        (dict(kept=name_of(2)), 409),
        (dict(kept=dict(name="nobody's", generation=1)), 404),
        (dict(kept=name_of(1), serialized_named_tensors=[]), 400),
        (dict(kept=dict(name="the trainer's pool")), 400),
        ({}, 400),
    ]:
        error = refusal(server, body)
        check(error.status == status and server.checksums() == now, f"{body} (to be refused with {status}): {error}")
    # Other memory under the same name: the kept memory is released.
    sender("make", variant=5, place=place)
    post(server, sender("pack", way="bucket", ranks=ranks), keep=name_of(2))
    check_sums(server, sums[5], 5, shapes, "kept anew")
    check(server.metric("refit:kept_tensor_names") == 1, "two are kept under one name")
    if on_card(options):
        held = sender("shares")["left"]
        check(
            held.get("1") == 1 and set(held) <= {"0", "1", "gone"},
            f"the flat tensor's reference alone must be held: {held}",
        )
    check(refusal(server, dict(kept=name_of(1))).status == 409, "an old generation was taken")
    # After the release nothing of it is left.
    said = server.post("/release_kept_tensors", dict(name=name_of(2)["name"]))
    check_given_back(sender, "released")
    check_closed(server, f"released: {said}")
    check(
        server.metric("refit:kept_tensor_names") == 0 and server.metric("refit:kept_tensor_bytes") == 0,
        "something is kept still",
    )
    check(refusal(server, dict(kept=name_of(2))).status == 404, "what was released was written")
    memory = sender("drop")
    check(memory.get("allocated", 0) == 0, f"the sender's memory is not free: {memory}")


@test("tensor/kept", limit_s=90)
def kept(options):
    """Kept memory is written repeatedly without handles, replaced, refused and released."""
    problems = Problems()
    cases = [(1, "plain", "pooled"), (2, "plain", "pooled")] + (
        [(2, "plain", "ordinary"), (1, "expandable", "ordinary")] if on_card(options) else []
    )
    for ranks, name, place in cases:
        problems(f"tp {ranks}, {name} {place}", lambda: life(options, ranks, name, place), servers.get((KIND, ranks)))
    problems.end()
    return f"{len(cases)} cases"


@test("tensor/kept-sender-ends", limit_s=60)
def sender_ends(options):
    """A sender is killed while its memory is kept: the next request is refused, or writes the same bytes again; then
    everything is closed."""
    shapes, notes = shapes_of(KIND), []
    for name in ["plain"] + (["expandable"] if on_card(options) else []):
        server = server_of(options, KIND, 1)
        server.post("/release_kept_tensors", {})
        with Process(SENDERS[name]) as sender:
            begin(options, sender, KIND)
            sender("make", variant=1)
            post(server, sender("pack", way="list", ranks=1), keep=name_of(1))
            now = server.checksums()
            sender.kill()
        if not on_card(options):
            settled(lambda: shared_files(sender.pid), lambda files: not files)
        try:
            post(server, [dict(kept=name_of(1))])
            said = "taken: a mapping outlives the process that shared it"
            check(on_card(options), "a file that is gone was read")
        except Refused as error:
            check(
                error.status in (400, 404) and "sender" in str(error),
                f"{name}: the refusal does not say that the sender has ended: {error}",
            )
            check(server.metric("refit:kept_tensor_names") == 0, f"{name}: it is kept still, after {error}")
            said = str(error)
        check(server.checksums() == now, f"{name}: the weights changed: {said}")
        server.post("/release_kept_tensors", {})
        check_closed(server, name)
        other = sender_of(options, KIND)
        other("make", variant=2)
        post(server, other("pack", way="list", ranks=1), keep=name_of(2))
        check_sums(server, other("sums", variant=2), 2, shapes, "the next sender")
        server.post("/release_kept_tensors", {})
        check_given_back(other, "the next sender")
        other("drop")
        notes.append(f"{name}: {said}")
    return "; ".join(notes)
