"""Requests that are refused: wrong handles and wrong fields. Every reference is released, and nothing changes."""

from harness import check, test
from machine import device_flags
from server import Refused, Server
from tensor_process import Process
from tensor_setup import (
    GOLDENS,
    PATH,
    Problems,
    begin,
    check_closed,
    check_given_back,
    check_sums,
    on_card,
    post,
    refusal,
    sender_of,
    server_of,
    shapes_of,
)

KIND = "qwen3"

# Invalid payloads, each refused with a message before it harms the GPU.
LIES = {
    "a handle of nobody's": "handle",
    "a segment that ends before its storage": "beyond",
    "an offset of a terabyte": "far",
    "an event of nobody's": "event",
    "a card that is not there": "uuid",
    "a counter that is not there": "counter",
}


@test("tensor/handles-that-lie", gpu=True, limit_s=90)
def lies(options):
    flags, env = device_flags(options)
    problems, notes, shapes = Problems(), [], shapes_of(KIND)
    # Not shared with other tests: some of these payloads leave references that nobody releases.
    sender = Process()
    server = Server(GOLDENS / KIND, *flags, "--max-total-tokens", 1024, env=env, wait_s=60)
    try:
        begin(options, sender, KIND)
        sender("make", variant=1)
        sums = sender("sums", variant=1)
        post(server, sender("pack", way="list", ranks=1))
        for what, lie in LIES.items():

            def work():
                body = dict(serialized_named_tensors=[sender("pack_lie", lie=lie)])
                try:
                    said = server.post(PATH, body, timeout=60)
                    # torch ignores a counter that is gone; a lost event may have passed already.
                    check(lie in ("counter", "event"), f"{what} was taken: {said}")
                    notes.append(f"{what}: taken")
                except Refused as error:
                    check(
                        error.status == 400 or (error.status == 500 and "torn" in str(error).lower()),
                        f"{what}: {error}",
                    )
                    notes.append(f"{what}: {error}")
                post(server, sender("pack", way="list", ranks=1))
                check_sums(server, sums, 1, shapes, f"after {what}")
                check(len(server.generate([[5, 6, 7]], 4)[0][0]) == 4, "it does not generate")

            problems(what, work, server)
            if server.process.poll() is not None:
                server = Server(GOLDENS / KIND, *flags, "--max-total-tokens", 1024, env=env, wait_s=60)
        problems("afterwards", lambda: check_closed(server, "lies"), server)
        problems.end(server)
        server.stop()
    finally:
        server.kill()
        sender.close()
    return "; ".join(notes)


@test("tensor/refused-and-given-back", limit_s=90)
def refused(options):
    """Every reference is released whatever is wrong with a request, and nothing changes."""
    problems, notes = Problems(), []
    small, other = "model.norm.weight", "model.layers.0.self_attn.q_norm.weight"
    for ranks in [1, 2]:
        server, sender = server_of(options, KIND, ranks), sender_of(options, KIND)
        sender("make", variant=3)
        post(server, sender("pack", way="list", ranks=ranks))
        before = server.checksums()
        cases = {
            "a name that the model has not": ({small: "nobody"}, {}),
            "another shape": ({small: other}, {}),
            "a field of a wrong type": ({small: small}, dict(weight_version=3)),
            "a bucket that is none": ({small: small}, dict(load_format="flattened_bucket")),
            "a loader that nobody has registered": ({small: small}, dict(load_format="my.loader")),
        }
        for what, (names, fields) in cases.items():

            def work():
                sender("forget")
                error = refusal(server, dict(serialized_named_tensors=[sender("pack_only", names=names)]), **fields)
                check(error.status == 400, f"{what}: {error}")
                if on_card(options):
                    left = check_given_back(sender, what)["left"]
                    check(left == {"0": 1}, f"{what}: its counter: {left}")
                check(server.checksums() == before, f"{what}: the weights changed")

            problems(f"{what}, tp {ranks}", work, server)
        if on_card(options) and ranks == 1:
            with Server(
                GOLDENS / KIND, "--device", "cpu", "--skip-tokenizer-init", "--max-total-tokens", 256, "--threads", 2
            ) as on_cpu:

                def work():
                    sender("forget")
                    error = refusal(on_cpu, sender("pack", way="list", ranks=1)[0])
                    check(
                        error.status == 400 and "GPU" in str(error),
                        f"GPU memory into an engine on the CPU: {error}",
                    )
                    check_given_back(sender, "an engine on the CPU")
                    notes.append(str(error))

                problems("an engine on the CPU", work, on_cpu)
        check_closed(server, "refused")
        sender("drop")
    problems.end()
    return "; ".join(notes)
