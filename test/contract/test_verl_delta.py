"""verl's delta_sharded: a whole first sync, then positions and values of changes, by the loader that SGLang imports."""

import gc
import json
import os

import pytest
import torch

from engines import DEVICES
from tensor_process import shared_files
from tensors import LocalSerializedTensor, checksum, coded, dumps, serialize
from test_verl import ServerAdapter, served

DELTA = pytest.mark.row(9, "verl / delta_sharded")
LOADER = "verl.workers.rollout.sglang_rollout.delta_loader.apply_delta"
STEADY_BYTES, SEED_BYTES, MOST_ELEMENTS = 3 << 10, 64 << 10, 300


def param(name, tensor, positions, values, first):
    """`first`: the offsets in bytes of positions and elements of values."""
    return dict(
        name=name,
        dtype=str(tensor.dtype)[len("torch.") :],
        shape=list(tensor.shape),
        pos_start=first[0],
        pos_end=first[0] + 4 * len(positions),
        pos_width=4,
        val_start=first[1],
        val_end=first[1] + len(values),
    )


def digest(positions, values):
    hashes = [int(torch.hash_tensor(blob).item()) if blob.numel() else 0 for blob in (positions, values)]
    return hashes[0] ^ (hashes[1] << 1)


def flush(spec, positions, values):
    """The named tensors of one request in verl's order. `positions`: None for whole tensors."""
    blob = positions if positions is not None else torch.empty(0, dtype=torch.uint8)
    spec = {**spec, "checksum": spec.get("checksum", digest(blob, values))}
    named = [("__delta_spec__", torch.frombuffer(bytearray(json.dumps(spec).encode()), dtype=torch.uint8))]
    return named + ([("__positions__", positions)] if positions is not None else []) + [("__values__", values)]


def indices(changes):
    """Sends a flush of (name, whole tensor, positions, values)."""
    params, at = [], [0, 0]
    for name, tensor, positions, values in changes:
        params.append(param(name, tensor, positions, values, at))
        at = [params[-1]["pos_end"], params[-1]["val_end"]]
    positions = torch.cat([change[2].to(torch.int32) for change in changes]).view(torch.uint8)
    return flush(dict(encoding="indices", params=params), positions, torch.cat([change[3] for change in changes]))


def dense(named, **fields):
    params, at = [], 0
    for name, tensor in named:
        params.append(param(name, tensor, [], tensor.flatten(), [0, at]))
        at = params[-1]["val_end"]
    return flush(
        dict(encoding="dense", params=params, verify=False, is_last=False) | fields,
        None,
        torch.cat([tensor.flatten() for _, tensor in named]),
    )


def diff(old, new):
    """The different bits in pieces of so many elements: (name, tensor, positions, values)."""
    for name, tensor in new.items():
        positions = (tensor.view(torch.int16) != old[name].view(torch.int16)).flatten().nonzero().flatten()
        for piece in positions.split(MOST_ELEMENTS) if len(positions) else ():
            yield name, tensor, piece, tensor.flatten()[piece]


def bucketed(items, size, limit):
    bucket, held = [], 0
    for item in items:
        bucket.append(item)
        held += size(item)
        if held >= limit:
            yield bucket
            bucket, held = [], 0
    if bucket:
        yield bucket


class Trainer:
    """Rank 0 of the trainers, and the engine's workers. Every rank of the engine gets a copy of each flush."""

    def __init__(self, engine, device):
        self.worker = ServerAdapter(engine, "cpu" if device == "cpu" else "cuda:0")
        self.engine, self.sent = engine, None

    def post(self, named, is_last=False, **fields):
        entries = self.worker.entries(named)
        try:
            return self.worker.http.request(
                "update_weights_from_tensor",
                dict(serialized_named_tensors=entries, load_format=LOADER, flush_cache=is_last, **fields),
            )
        finally:
            self.worker.handles = []
            gc.collect()
            if self.worker.device != "cpu":
                torch.cuda.ipc_collect()

    def stream(self, flushes):
        flushes = list(flushes)
        return [self.post(named, is_last=index == len(flushes) - 1) for index, named in enumerate(flushes)]

    def seed(self, weights):
        self.stream(dense(bucket) for bucket in bucketed(weights.items(), lambda item: item[1].nbytes, SEED_BYTES))
        self.sent = weights

    def steady(self, weights):
        buckets = bucketed(diff(self.sent, weights), lambda change: len(change[2]) * 6, STEADY_BYTES)
        replies = self.stream(indices(bucket) for bucket in buckets)
        self.sent = weights
        return replies

    def verify(self, weights):
        buckets = list(bucketed(weights.items(), lambda item: item[1].nbytes, SEED_BYTES))
        return self.stream(
            dense(bucket, verify=True, is_last=index == len(buckets) - 1) for index, bucket in enumerate(buckets)
        )

    def holds(self, weights):
        got = self.engine.checksums()
        wrong = [name for name, tensor in weights.items() if got.get(name) != checksum(tensor)]
        assert not wrong, f"{len(wrong)} of {len(weights)} tensors are not what was sent: {wrong[:5]}"


def whole(engine, variant):
    return dict(engine.tensors(variant))


def stepped(weights, step, share=0.02):
    """A training step: changes a few elements of most tensors, the first and the last of each among them."""
    out = {}
    for index, (name, tensor) in enumerate(weights.items()):
        noise = torch.rand(tensor.numel(), generator=torch.Generator().manual_seed(step * 1000 + index))
        chosen = noise < share
        chosen[0] = chosen[-1] = True
        if index % 5 == 4:
            chosen[:] = False
        out[name] = torch.where(chosen.reshape(tensor.shape), coded(step + 100, name, tensor.shape), tensor)
    return out


@pytest.fixture
def trainer(engines):
    return Trainer(served(engines, 1, "cpu"), "cpu")


@DELTA
@pytest.mark.brings("memory")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_first_sync_is_whole_and_later_ones_change_single_elements_of_every_rank(engines, ranks, device):
    """As its checkpoint manager: abort, release the cache, flushes, resume.

    A, B, A. Elements outside all flushes stay.
    """
    trainer = Trainer(served(engines, ranks, device), device)
    before = set(shared_files(os.getpid()))
    first = whole(trainer.engine, 1)
    trainer.engine.spoil()
    trainer.seed(first)
    trainer.holds(first)
    second = stepped(first, 2)
    for weights in (second, first, stepped(second, 3), second):
        trainer.worker.http.request("abort_request", dict(rid="", abort_all=True))
        trainer.worker.release(["kv_cache"])
        replies = trainer.steady(weights)
        trainer.worker.resume("kv_cache")
        assert len(replies) > 3
        changed = sum(reply["report"]["changed"] for reply in replies)
        assert changed == sum(reply["report"]["bytes"] for reply in replies) / 6, (
            "every element that was sent was another one"
        )
        trainer.holds(weights)
        assert len(trainer.engine.tokens()["output_ids"]) == 4
    gc.collect()
    assert set(shared_files(os.getpid())) <= before


@DELTA
@pytest.mark.brings("memory")
@pytest.mark.parametrize("device", DEVICES)
def test_a_repeated_flush_changes_nothing(engines, device):
    trainer = Trainer(served(engines, 2, device), device)
    first = whole(trainer.engine, 1)
    trainer.seed(first)
    second = stepped(first, 2)
    changes = list(diff(first, second))
    assert trainer.post(indices(changes))["report"]["changed"] > 0
    trainer.holds(second)
    assert trainer.post(indices(changes), is_last=True)["report"]["changed"] == 0
    trainer.holds(second)


@DELTA
@pytest.mark.brings("memory")
@pytest.mark.parametrize("device", DEVICES)
def test_a_sweep_finds_differences_from_the_trainer(engines, device):
    """Every K syncs the whole weights are sent again.

    Equal weights are a success. A difference is an error of the last flush, and is repaired by it.
    """
    trainer = Trainer(served(engines, 2, device), device)
    first = whole(trainer.engine, 1)
    trainer.seed(first)
    second = stepped(first, 2)
    trainer.steady(second)
    trainer.verify(second)
    name, tensor = next((name, tensor) for name, tensor in second.items() if tensor.dim() == 2)
    trainer.post(indices([(name, tensor, torch.tensor([3, 9]), coded(50, name, tensor.shape).flatten()[[3, 9]])]))
    with pytest.raises(RuntimeError, match="400: .*verification failed: 2 elements"):
        trainer.verify(second)
    trainer.holds(second)
    trainer.verify(second)


@DELTA
@pytest.mark.brings("memory")
def test_values_of_another_dtype_are_rounded(trainer):
    first = whole(trainer.engine, 1)
    trainer.seed(first)
    name = "model.norm.weight"
    values = torch.tensor([1.00390625 * 1.001, -3.3], dtype=torch.float32)
    trainer.post(indices([(name, first[name].float(), torch.tensor([1, 7]), values)]))
    flat = first[name].clone().flatten()
    flat[[1, 7]] = values.to(torch.bfloat16)
    trainer.holds({**first, name: flat.reshape(first[name].shape)})


def wrong_deltas(tensor, name="model.norm.weight"):
    """Wrong flushes by the text of their refusal."""
    two = torch.ones(2, dtype=torch.bfloat16)
    good = indices([(name, tensor, torch.tensor([0, 1]), two)])
    spec, positions, values = (dict(good)[key] for key in ("__delta_spec__", "__positions__", "__values__"))
    said = json.loads(bytes(spec.tolist()))

    def told(blob=positions, held=values, **fields):
        return flush({**said, **fields}, blob, held)

    def params(**fields):
        return [{**said["params"][0], **fields}]

    end = tensor.numel()
    yield "outside of its", indices([(name, tensor, torch.tensor([0, end]), two)])
    yield "position -1 lies outside", indices([(name, tensor, torch.tensor([0, -1]), two)])
    yield "position 1 comes twice", indices([(name, tensor, torch.tensor([1, 1]), two)])
    yield (
        "position 1 comes twice",
        indices([(name, tensor, torch.tensor([1]), two[:1]), (name, tensor, torch.tensor([1]), two[:1])]),
    )
    yield "checksum", told(checksum=said["checksum"] ^ 1)
    yield "no_such", told(params=params(name="model.no_such.weight"))
    yield "shape", told(params=params(shape=[3]))
    yield "float64|not one of weights", told(params=params(dtype="float64"))
    yield "int32", told(held=torch.ones(2, dtype=torch.int32), checksum=0)
    yield "bytes each", told(params=params(pos_width=8))
    yield "8 bytes of positions for 1", told(params=params(val_end=1))
    yield "describes 4 bytes of positions and 1 values", told(params=params(pos_end=4, val_end=1))
    yield "describes 8 bytes", told(blob=positions[:4])
    yield "describes 8 bytes", told(held=values[:1])
    yield "where those of the one before end", told(params=params() + params())
    yield "where those of the one before end", told(params=params(pos_start=4, pos_end=12))
    yield "encoding", told(encoding="bitmask")
    yield "positions and values do not say", told(params=params(pos_start=-4))
    yield "not JSON", [("__delta_spec__", torch.tensor([123, 34], dtype=torch.uint8)), *good[1:]]
    yield "a delta is __delta_spec__", good[1:]
    yield "a delta is __delta_spec__", [*good, ("more", two)]
    yield (
        "values for",
        flush(dict(encoding="dense", params=params(pos_start=0, pos_end=0), verify=False, is_last=True), None, values),
    )


@DELTA
@pytest.mark.brings("memory")
@pytest.mark.parametrize("ranks", [1, 2])
def test_wrong_deltas_are_refused_and_nothing_is_lost(engines, ranks):
    """No byte has changed, every handle has been returned, and the correct delta works afterwards."""
    trainer = Trainer(served(engines, ranks, "cpu"), "cpu")
    first = whole(trainer.engine, 1)
    trainer.seed(first)
    gc.collect()
    before = set(shared_files(os.getpid()))
    for words, named in wrong_deltas(first["model.norm.weight"]):
        with pytest.raises(RuntimeError, match=f"(?s)400: .*({words})"):
            trainer.post(named)
        named = None
    gc.collect()
    assert set(shared_files(os.getpid())) <= before
    trainer.holds(first)
    assert trainer.engine.get("/server_info")["weights"] == "current"
    second = stepped(first, 2)
    trainer.steady(second)
    trainer.holds(second)


@DELTA
@pytest.mark.brings("memory")
def test_ranks_that_are_sent_different_deltas_are_refused(engines):
    trainer = Trainer(served(engines, 2, "cpu"), "cpu")
    first = whole(trainer.engine, 1)
    trainer.seed(first)
    tensor, one = first["model.norm.weight"], torch.ones(1, dtype=torch.bfloat16)
    flushes = [indices([("model.norm.weight", tensor, torch.tensor([at]), one)]) for at in (0, 10)]
    named = [(group[0][0], LocalSerializedTensor([dumps(part[1]) for part in group])) for group in zip(*flushes)]
    with pytest.raises(RuntimeError, match="400: .*different deltas"):
        trainer.worker.http.request(
            "update_weights_from_tensor", dict(serialized_named_tensors=[serialize(named)] * 2, load_format=LOADER)
        )
    trainer.holds(first)


@DELTA
@pytest.mark.brings("memory")
def test_a_delta_of_a_torn_tensor_is_refused_by_name_until_the_whole_tensor_is_sent(trainer):
    first = whole(trainer.engine, 1)
    trainer.seed(first)
    second = stepped(first, 2)
    trainer.engine.spoil()
    with pytest.raises(RuntimeError, match="409: .*model.* is torn.*send it whole"):
        trainer.steady(second)
    with pytest.raises(RuntimeError, match="503"):
        trainer.worker.http.request("generate", dict(input_ids=[1], sampling_params=dict(max_new_tokens=1)))
    trainer.seed(first)
    trainer.steady(second)
    trainer.holds(second)


@DELTA
@pytest.mark.brings("memory")
def test_a_delta_is_not_kept_and_can_be_part_of_a_transaction(trainer):
    first = whole(trainer.engine, 1)
    trainer.seed(first)
    second = stepped(first, 2)
    changes = list(diff(first, second))
    with pytest.raises(RuntimeError, match="400: .*cannot be kept"):
        trainer.post(indices(changes), keep=dict(name="delta", generation=1))
    trainer.holds(first)
    opened = trainer.engine.post("/weight_transactions", dict(owner="verl", weight_version="two"))
    for bucket in bucketed(changes, lambda change: len(change[2]) * 6, STEADY_BYTES):
        trainer.post(indices(bucket), transaction=opened["id"])
    assert trainer.engine.version() != "two"
    trainer.engine.post(f"/weight_transactions/{opened['id']}/commit", {})
    assert trainer.engine.version() == "two"
    trainer.holds(second)
