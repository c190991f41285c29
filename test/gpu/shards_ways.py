"""Updates from the shards of FSDP2 trainers: over CUDA IPC on the engine's own GPUs, and by NCCL from rank to rank
between GPUs.

"tt-aa": two ranks of a trainer, and an engine of two ranks. NCCL takes one rank for each GPU, so these need as many
GPUs; over IPC trainer and engine share them. On a CPU the same tests use gloo and shared memory.
"""

import contextlib
import json

import harness
import models
from distributed_setup import DEADLINE_S, GOLDENS, KIND, LARGE, NCCL, server_of, state_after
from distributed_life import SMALL
from harness import Skip, check, test
from machine import cards, room
from server import Refused, free_port, settled
from tensor_process import Process, SenderFailed
from tensor_setup import check_sums, on_card

MIB = 1 << 20
made = {}


class Ranks:
    """The processes of a trainer, which get the same calls."""

    def __init__(self, options, world, first=0):
        port = free_port()
        self.processes = [Process(NCCL, "shard_trainer.py") for _ in range(world)]
        for rank, process in enumerate(self.processes):
            device = f"cuda:{first + rank}" if on_card(options) else "cpu"
            process.begin("start", device=device, rank=rank, world=world, port=port)
        self.versions = self.end()[0]

    def __call__(self, do, limit_s=120, **arguments):
        for process in self.processes:
            process.begin(do, **arguments)
        return self.end(limit_s)

    def end(self, limit_s=120):
        """The answers; after a failure those of all ranks have been awaited."""
        answers, failed = [], []
        for rank, process in enumerate(self.processes):
            try:
                answers.append(process.end(limit_s))
            except SenderFailed as error:
                failed.append(f"rank {rank}: {error}")
        if failed:
            raise SenderFailed("\n".join(failed))
        return answers

    @property
    def usable(self):
        return all(process.usable for process in self.processes)

    def kill(self):
        for process in self.processes:
            process.kill()


def ranks_of(options, world):
    """A trainer that the tests share; a new one if the last test ended it."""
    ranks = made.get(world)
    if ranks is None or not ranks.usable:
        if ranks is not None:
            ranks.kill()
        made[world] = Ranks(options, world)
    return made[world]


def close_all():
    for ranks in made.values():
        ranks.kill()
    made.clear()


harness.at_end("shards/end", close_all)


def parts_of(layout):
    trainer, engine = layout.split("-")
    return len(trainer), len(engine)


def shapes_of(folder):
    return [(name, entry[2]) for name, entry in models.headers(folder).items()]


def holds(server, sums, variant, shapes, what):
    check_sums(server, sums[variant], variant, shapes, what)
    check(server.metric("refit:weights_torn") == 0, f"{what}: weights are torn")


def there_and_back(options, ranks, server, folder, ways, **fields):
    """Three updates by each of the ways, with weights in between that no update has sent."""
    placements = ranks("model", folder=str(folder))[0]
    check(any("Shard" in text for text in placements), f"nothing is sharded: {placements}")
    sums = {variant: ranks("sums", variant=variant)[0] for variant in (1, 2)}
    notes = []
    for way in ways:
        server.post("/weights_checker", dict(action="reset_tensors"))
        for step, variant in enumerate([1, 2, 1]):
            ranks("fill", variant=variant)
            reply = ranks("update", url=server.url, version=f"{way} {step}", transport=way, **fields)[0]
            holds(server, sums, variant, shapes_of(folder), f"{way}, step {step}")
            check(server.get("/get_weight_version")["weight_version"] == f"{way} {step}", "another version")
        notes.append(f"{way}: {1000 * reply['seconds']:.0f} ms")
        if way == "group":
            check(reply["backend"] == ("nccl" if on_card(options) else "gloo"), f"it went by {reply['backend']}")
        ranks("leave")
    check(len(server.generate([[5, 6, 7]], 4)[0][0]) == 4, "it does not generate")
    return "; ".join(notes)


def over_ipc(layout):
    def run(options):
        world, tp = parts_of(layout)
        if on_card(options) and max(world, tp) > cards():
            raise Skip(f"NOT TRIED: {layout} needs {max(world, tp)} cards, and there are {cards()}")
        server = server_of(options, GOLDENS / KIND, "i", tp, 0)
        ways = ["handles", "kept", "handles"]
        return there_and_back(options, ranks_of(options, world), server, GOLDENS / KIND, ways, bucket_bytes=MIB)

    return run


for layout in ["t-a", "tt-a", "tt-aa"]:
    test(f"shards/ipc/{layout}", limit_s=120)(over_ipc(layout))


def engine_behind(options, folder, layout, *flags):
    """The engine on the GPUs behind the trainer's."""
    world, tp = parts_of(layout)
    if on_card(options) and world + tp > cards():
        raise Skip(f"NOT TRIED: {layout} needs {world + tp} cards, one for each rank, and there are {cards()}")
    return server_of(options, folder, "n", tp, world, *flags)


def over_nccl(layout):
    def run(options):
        server = engine_behind(options, GOLDENS / KIND, layout)
        ranks = ranks_of(options, parts_of(layout)[0])
        # Chunks of the size of a tensor, and one for everything: a new group each.
        small = there_and_back(options, ranks, server, GOLDENS / KIND, ["group"], bucket_bytes=1 << 16)
        large = there_and_back(options, ranks, server, GOLDENS / KIND, ["group"], bucket_bytes=512 * MIB)
        return f"{ranks.versions}; small chunks {small}; large {large}"

    return run


for layout in ["t-a", "t-aa", "tt-a", "tt-aa", "tttt-aa"]:
    test(f"shards/nccl/{layout}", limit_s=150)(over_nccl(layout))


@contextlib.contextmanager
def large_engine(options, layout="t-a"):
    with room(options, 0) as place:
        folder = models.hollow(place / "model", LARGE if on_card(options) else SMALL)
        server = engine_behind(options, folder, layout)
        try:
            yield server, folder
        finally:
            if server.process.poll() is None:
                server.stop()


def usual(ranks, server, folder, sums, variant, **fields):
    ranks("fill", variant=variant)
    reply = ranks("update", url=server.url, version=f"usual {variant}", transport="group", **fields)[0]
    holds(server, sums, variant, shapes_of(folder), f"the usual update, variant {variant}")
    return reply


@test("shards/nccl/in-place", limit_s=150)
def in_place(options):
    """Most bytes of a large model go straight into the parameters."""
    with large_engine(options) as (server, folder):
        ranks = ranks_of(options, 1)
        ranks("model", folder=str(folder))
        sums = {variant: ranks("sums", variant=variant)[0] for variant in (1, 2)}
        notes = []
        for variant, bucket in ((1, 256 * MIB), (2, 32 * MIB), (1, 32 * MIB)):
            reply = usual(ranks, server, folder, sums, variant, bucket_bytes=bucket)
            received = server.metric("refit:group_received_bytes_total")
            notes.append(f"{1000 * reply['seconds']:.1f} ms, {reply['entry']['ms']}, {received / 1e9:.2f} GB received")
        check(server.metric("refit:group_dropped_bytes_total") == 0, "bytes were dropped")
        ranks("leave")
        return "; ".join(notes)


@test("shards/nccl/killed", limit_s=150)
def killed(options):
    """A trainer that is killed at its first chunk, and midway: old, or torn by name; a new one heals it."""
    notes = []
    with large_engine(options) as (server, folder):
        for chunk in (0, 5):
            ranks = ranks_of(options, 1)
            ranks("model", folder=str(folder))
            sums = {variant: ranks("sums", variant=variant)[0] for variant in (1, 2)}
            # Chunks that are small enough for several of them to be under way.
            fields = dict(bucket_bytes=16 * MIB if on_card(options) else MIB)
            usual(ranks, server, folder, sums, 1, **fields)
            ranks("fill", variant=2)
            ranks("dies", chunk=chunk)
            try:
                ranks("update", url=server.url, version="never", transport="group", **fields)
                raise AssertionError("the update of a killed trainer succeeded")
            except SenderFailed:
                pass
            entry = failed_update(server)
            state = state_after(server, sums[1], sums[2], f"killed at chunk {chunk}")
            # NCCL receives straight into parameters, and nobody knows whether any byte has come.
            is_old = chunk == 0 and not on_card(options)
            check(state == "old" if is_old else state.startswith("torn"), f"killed at chunk {chunk}: {state}")
            check(server.get("/get_weight_version")["weight_version"] == "usual 1", "the label has moved")
            notes.append(f"at chunk {chunk}: {state}, {json.dumps(entry)[:300]}")
            end_transaction(server)
            healer = ranks_of(options, 1)
            healer("model", folder=str(folder))
            usual(healer, server, folder, sums, 2, **fields)
            healer("leave")
    return "; ".join(notes)


def failed_update(server):
    """The last update, once it has ended: the engine waits for its deadline at most."""
    def last():
        updates = server.get("/updates")["updates"]
        return updates[0] if updates and updates[0]["error"] is not None else None

    entry = settled(last, lambda entry: entry is not None, DEADLINE_S + 8)
    check(entry is not None, f"no update has ended: {server.get('/updates')['updates'][:1]}")
    return entry


def end_transaction(server):
    opened = server.get("/weight_transactions")["open"]
    if opened is not None:
        server.post(f"/weight_transactions/{opened['id']}/abort")


@test("shards/nccl/late", limit_s=150)
def late(options):
    """A trainer that stops midway for longer than the engine waits: both sides end, and both go on."""
    with large_engine(options) as (server, folder):
        ranks = ranks_of(options, 1)
        ranks("model", folder=str(folder))
        sums = {variant: ranks("sums", variant=variant)[0] for variant in (1, 2)}
        fields = dict(bucket_bytes=16 * MIB if on_card(options) else MIB)
        usual(ranks, server, folder, sums, 1, **fields)
        ranks("fill", variant=2)
        ranks("stops", chunk=5, seconds=DEADLINE_S + 4)
        try:
            ranks("update", url=server.url, version="never", transport="group", **fields)
            raise AssertionError("a late update succeeded")
        except SenderFailed as error:
            said = str(error)
        check("WEIGHTS_TORN" in said or "Torn" in said or "torn" in said, said[-800:])
        state = state_after(server, sums[1], sums[2], "late")
        usual(ranks, server, folder, sums, 2, **fields)
        ranks("leave")
        return f"{state}; {said.splitlines()[-1][:400]}"


@test("shards/nccl/refused", limit_s=120)
def refused(options):
    """A refused update ends on both sides without a hang, and changes nothing."""
    server = engine_behind(options, GOLDENS / KIND, "t-a")
    ranks, folder = ranks_of(options, 1), GOLDENS / KIND
    ranks("model", folder=str(folder))
    sums = {variant: ranks("sums", variant=variant)[0] for variant in (1, 2)}
    fields = dict(bucket_bytes=1 << 16)
    usual(ranks, server, folder, sums, 1, **fields)
    ranks("fill", variant=2)
    for _ in range(2):
        try:
            # The engine has no second set of weights.
            more = dict(limit_s=60, also=dict(swap="demand"))
            ranks("update", url=server.url, version="never", transport="group", **more, **fields)
            raise AssertionError("a swap without a second set succeeded")
        except SenderFailed as error:
            said = str(error)
        check("CONFLICT" in said or "UNSUPPORTED" in said, said[-600:])
        check(not on_card(options) or "received and dropped" in said, said[-600:])
        holds(server, sums, 1, shapes_of(folder), "after a refusal")
    usual(ranks, server, folder, sums, 2, **fields)
    ranks("leave")
    return said.splitlines()[-1][:400]


@test("shards/nccl/one-card-for-both", gpu=True, limit_s=90)
def one_card(options):
    """NCCL refuses two ranks on one GPU: both sides report it, and the server lives."""
    server = server_of(options, GOLDENS / KIND, "s", 1, 0)
    ranks = Ranks(options, 1)
    try:
        ranks("model", folder=str(GOLDENS / KIND))
        ranks("fill", variant=1)
        ranks("update", url=server.url, version="never", transport="group", backend="nccl", timeout_s=20, limit_s=60)
        raise AssertionError("two ranks on one GPU were taken")
    except SenderFailed as error:
        said = str(error)
    finally:
        ranks.kill()
    check("GPU" in said or "GROUP" in said, said[-600:])
    with contextlib.suppress(Refused):
        end_transaction(server)
    check(len(server.generate([[5, 6, 7]], 4)[0][0]) == 4, "it does not generate")
    return said.splitlines()[-1][:300]
