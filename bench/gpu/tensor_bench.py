"""/update_weights_from_tensor on a GPU: whole requests, POST to 200 over HTTP, beside the GPU's own copy and torch's
receive path.

usage: tensor_bench.py [--only WORD]... [--device cuda|cpu] [--model qwen3-8b] [--layers N] [--folder DIR] [--out FILE]

tensor-empty, tensor-pooled, tensor-ordinary, tensor-buckets, tensor-kept and tensor-30b are the parts. Prints markdown
rows: figure | refit | compared with | ratio | goal | reached. This process is the trainer: its weights lie on the GPU,
it packs new handles for every update (that time is the trainer's, and listed separately), and posts them over one
connection. refit and the comparison take turns. Checkpoints are sparse files, which take no room; after every part all
checksums are compared with the trainer's.
"""

import gc
import pathlib
import statistics
import sys
import time

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "test/gpu"))
import machine  # noqa: E402
import models  # noqa: E402
import tensor_payloads as payloads  # noqa: E402
from report import attempt, keep, read_options, row  # noqa: E402
from server import Server  # noqa: E402
from tensor_client import Client, torch_receiver  # noqa: E402
from tiny_models import TINY, TINY_MOE  # noqa: E402

ROUNDS = 15
# A training run has hundreds of updates. Before those that count, the server's JavaScript is compiled and torch's pools
# are warm.
WARM = 20
# For small requests, whose time is JavaScript's: it is optimised as it runs, and takes a tenth longer after 20 updates
# than after 120 or 400.
WARM_SMALL = 100
BUCKET = 512_000_000
MOST_SEGMENTS = 32


def synchronize(options):
    if options.device == "cuda":
        torch.cuda.synchronize()


def forget(options):
    gc.collect()
    if options.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


def copy_ms(options, size):
    """The median milliseconds of the GPU's own copy of so many bytes, in a few large pieces."""
    piece = min(size, 4 << 30)
    source = torch.ones(piece, dtype=torch.uint8, device=options.torch_device)
    target = torch.empty_like(source)
    count, taken = -(-size // piece), []
    for _ in range(ROUNDS + 2):
        synchronize(options)
        began = time.perf_counter()
        for _ in range(count):
            target.copy_(source)
        synchronize(options)
        taken.append(1000 * (time.perf_counter() - began))
    del source, target
    forget(options)
    return statistics.median(taken[2:]) * size / (piece * count)


def lists(named):
    """One request with a handle for each tensor."""
    yield dict(serialized_named_tensors=[payloads.serialize(named, by_uuid=False)])


def buckets(named):
    """Requests of flattened buckets: each is packed when the previous one has been answered."""
    for bucket in payloads.by_bytes(named, BUCKET):
        flat = payloads.flatten(bucket, bucket[0][1].device)
        if flat["flattened_tensor"].is_cuda:
            torch.cuda.synchronize()
        yield dict(serialized_named_tensors=[payloads.serialize(flat)], load_format="flattened_bucket")
        del flat


def updates(clients, pack, named, rounds=ROUNDS, warm=WARM):
    """Runs the clients in turn. Returns for each client and every round after the warm ones: (milliseconds of all its
    requests, replies, milliseconds of packing). Clients remember the milliseconds of the first round as `first`."""
    found = [[] for _ in clients]
    for turn in range(warm + rounds):
        for client, taken in zip(clients, found):
            posting, packing, replies = 0.0, 0.0, []
            began = time.perf_counter()
            for body in pack(named):
                packing += 1000 * (time.perf_counter() - began)
                ms, reply = client.post(body)
                posting += ms
                replies.append(reply)
                began = time.perf_counter()
            if turn == 0:
                client.first = posting
            if turn >= warm:
                taken.append((posting, replies, packing))
    return found


def median_of(taken, at=0):
    return statistics.median(entry[at] for entry in taken)


def spread(taken):
    values = [entry[0] for entry in taken]
    return f"{min(values):.1f} to {max(values):.1f}"


def phases(taken):
    """Medians of the report's milliseconds, summed over the requests of an update."""
    names = taken[0][1][0]["report"]["ms"]
    return {
        name: round(
            statistics.median(sum(reply["report"]["ms"].get(name, 0) for reply in replies) for _, replies, _ in taken),
            2,
        )
        for name in names
    }


def segments(named):
    """The number of torch's segments that contain the tensors."""
    if not named[0][1].is_cuda:
        return len({tensor.untyped_storage().data_ptr() for _, tensor in named})
    bases, places = [], {tensor.untyped_storage().data_ptr() for _, tensor in named}
    for segment in torch.cuda.memory_snapshot():
        bases.append((segment["address"], segment["address"] + segment["total_size"]))
    return sum(any(start <= place < end for place in places) for start, end in bases)


class Dense:
    """A server of the dense model, its trainer's weights, and helpers for the parts."""

    def __init__(self, options, server, config):
        self.options, self.server = options, server
        self.client = Client(server.port)
        self.shapes = models.tensors(config)
        self.bytes = models.size(self.shapes)

    def poison(self):
        self.server.post("/weights_checker", dict(action="reset_tensors"))

    def verify(self, named):
        wanted, got = payloads.checksums_of(named), self.server.checksums()
        wrong = [name for name in wanted if got.get(name) != wanted[name]]
        if wrong or got.keys() != wanted.keys():
            raise AssertionError(f"{len(wrong)} of {len(wanted)} tensors are not what was sent: {wrong[:5]}")

    def told(self, taken):
        ms = median_of(taken)
        return (
            f"{ms:.2f} ms, {self.bytes / ms / 1e6:.0f} GB/s ({spread(taken)}; the first {self.client.first:.0f}; "
            f"packing, not counted, {median_of(taken, 2):.0f}; inside {phases(taken)})"
        )

    def copied(self, ms):
        return f"{ms:.2f} ms, copy on the card, {self.bytes / ms / 1e6:.0f} GB/s"


def empty(dense):
    device = dense.options.torch_device

    def once():
        flat = payloads.flatten([], device)
        return dense.client.post(
            dict(serialized_named_tensors=[payloads.serialize(flat)], load_format="flattened_bucket", flush_cache=False)
        )[0]

    for _ in range(10 * WARM_SMALL):
        once()
    taken = sorted(once() for _ in range(400))
    ms = statistics.median(taken)
    row("an empty bucket, median of 400", f"{ms:.3f} ms (90 of 100 under {taken[360]:.3f})", "1 ms", ms, 1, most=True)


def handles(dense, place, title, goal, against_torch):
    options = dense.options
    named = getattr(payloads, place)(1, dense.shapes, options.torch_device)
    count, copy = segments(named), copy_ms(options, dense.bytes)
    if place == "pooled" and count > MOST_SEGMENTS:
        raise AssertionError(f"the pooled sender has {count} segments")
    dense.poison()
    with torch_receiver(options, dense.shapes) as receiver:
        ours, theirs = updates([dense.client, receiver], lists, named)
    dense.verify(named)
    whole = median_of(ours)
    row(
        f"{title}, {dense.bytes / 1e9:.1f} GB, {len(named)} handles, {count} segments",
        dense.told(ours),
        dense.copied(copy),
        whole / copy,
        goal,
        most=True,
    )
    inside = {
        name: round(statistics.median(replies[0][name] for _, replies, _ in theirs), 1) for name in theirs[0][1][0]
    }
    receiving = statistics.median(replies[0]["unpickle"] + replies[0]["copy"] for _, replies, _ in theirs)
    row(
        "the same",
        f"{whole:.2f} ms",
        f"{receiving:.1f} ms, torch in another process, unpickle and copy_, without HTTP and closing ({inside})",
        receiving / whole,
        2 if against_torch else None,
    )


def pooled(dense):
    handles(dense, "pooled", "one handle for each tensor, pooled sender", 1.4, False)


def ordinary(dense):
    handles(dense, "ordinary", "one handle for each tensor, torch's allocator", 2.1, True)


def flattened(dense):
    options = dense.options
    named = payloads.pooled(2, dense.shapes, options.torch_device)
    copy = copy_ms(options, dense.bytes)
    dense.poison()
    with torch_receiver(options, dense.shapes) as receiver:
        ours, theirs = updates([dense.client, receiver], buckets, named, warm=WARM_SMALL)
    dense.verify(named)
    count, whole, torch_ms = len(ours[0][1]), median_of(ours), median_of(theirs)
    row(
        f"flattened buckets of {BUCKET / 1e6:.0f} MB, {count} requests",
        dense.told(ours),
        f"{copy + 0.5 * count:.2f} ms: {dense.copied(copy)}, and 0.5 ms a request",
        whole / (copy + 0.5 * count),
        1,
        most=True,
    )
    row(
        "the same",
        f"{whole:.2f} ms",
        f"{torch_ms:.1f} ms, torch behind the same HTTP loop ({spread(theirs)})",
        torch_ms / whole,
        1,
    )


def kept(dense):
    options = dense.options
    named = payloads.pooled(3, dense.shapes, options.torch_device)
    copy = copy_ms(options, dense.bytes)
    dense.poison()
    name = dict(name="bench", generation=1)
    (body,) = lists(named)
    dense.client.first = dense.client.post({**body, "keep": name})[0]
    taken = []
    for variant in range(WARM + ROUNDS):
        # Another step's values in the same memory.
        for _, tensor in named[:3]:
            tensor.view(torch.int16).bitwise_xor_(variant + 1)
        synchronize(options)
        ms, reply = dense.client.post(dict(kept=name))
        if variant >= WARM:
            taken.append((ms, [reply], 0.0))
    dense.verify(named)
    dense.server.post("/release_kept_tensors", dict(name="bench"))
    whole = median_of(taken)
    row("kept mapping", dense.told(taken), dense.copied(copy), whole / copy, 1.15, most=True)


DENSE = {
    "tensor-empty": empty,
    "tensor-pooled": pooled,
    "tensor-ordinary": ordinary,
    "tensor-buckets": flattened,
    "tensor-kept": kept,
}


def mixture(options, server, config, layers, whole_model):
    run = Dense(options, server, config)
    named = payloads.pooled(4, run.shapes, options.torch_device)
    run.poison()
    (taken,) = updates([run.client], lists, named, rounds=8, warm=12)
    run.verify(named)
    ms, inside = median_of(taken), phases(taken)
    title = (
        f"{options.mixture}{'' if whole_model else f', {layers} layers of it'}, {len(named)} handles in one request, "
        f"{run.bytes / 1e9:.1f} GB, pooled sender, {segments(named)} segments"
    )
    row(title, run.told(taken), "100 ms", ms / 100, 1 if whole_model else None, most=True)
    # The report leaves out the time before the plan (reading the body, decoding, opening the senders' counters) and the
    # reply.
    decoded = inside.get("decode")
    before = ms - inside["total"] if decoded is None else decoded
    row(
        "of which decoding" if decoded is not None else "of which before the plan: HTTP, decoding, opening shares",
        f"{before:.1f} ms",
        "40 ms",
        before / 40,
        1 if whole_model else None,
        most=True,
    )


def run_dense(options, chosen, failed):
    config = (
        TINY
        if options.model == "tiny"
        else dict(
            models.REAL[options.model], **({} if options.layers is None else dict(num_hidden_layers=options.layers))
        )
    )
    with machine.room(options, 0) as place:
        folder = models.hollow(place / "model", config)
        flags, env = machine.device_flags(options)
        flags += ["--dtype", "bfloat16"] if options.device == "cpu" else []
        with Server(folder, *flags, "--max-total-tokens", 4096, env=env) as server:
            dense = Dense(options, server, config)
            for part in chosen:
                attempt(part, lambda: DENSE[part](dense), failed, server)
                forget(options)


def run_mixture(options, failed):
    name = "qwen3-30b-a3b"
    config, whole = (TINY_MOE, True) if options.model == "tiny" else (dict(models.REAL[name]), True)
    options.mixture = "tiny mixture" if options.model == "tiny" else name
    if options.device == "cuda" and options.model != "tiny":
        fit = machine.layers_that_fit(name, (machine.free_on_card() - 8e9) / 2)
        whole = fit >= config["num_hidden_layers"]
        config["num_hidden_layers"] = fit
    with machine.room(options, 0) as place:
        folder = models.hollow(place / "model", config)
        flags, env = machine.device_flags(options)
        flags += ["--dtype", "bfloat16"] if options.device == "cpu" else []
        with Server(folder, *flags, "--max-total-tokens", 1024, env=env) as server:
            attempt(
                "tensor-30b",
                lambda: mixture(options, server, config, config["num_hidden_layers"], whole),
                failed,
                server,
            )


def main():
    options, chosen = read_options(__doc__, [*DENSE, "tensor-30b"])
    if options.device == "cpu":
        torch.set_num_threads(1)
    failed = []
    try:
        dense = [part for part in chosen if part in DENSE]
        if dense:
            attempt("the dense model", lambda: run_dense(options, dense, failed), failed)
            forget(options)
        if "tensor-30b" in chosen:
            attempt("tensor-30b", lambda: run_mixture(options, failed), failed)
    finally:
        keep()
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
