"""Payloads of senders for other engines, and payloads that are refused, with real torch and without leaks."""

import base64
import gc
import os
import re
import signal
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import reduce_tensor

from conftest import SMALL, Server
from leaks import gone, grown
from tensors import (
    ROOT,
    FlattenedTensorMetadata,
    Refused,
    bucket,
    checksum,
    checksums,
    coded,
    descriptors,
    dumps,
    file_count,
    mappings,
    metric,
    post,
    resident,
    serialize,
    shared_files,
    threads,
    update,
)

CARDS = [f"3f0ce3ab-1111-2222-3333-{i:012x}" for i in range(4)]
SKYRL = "skyrl_train.inference_engines.sglang.sglang_engine.sglang_custom_weight_loader"


@pytest.fixture(scope="module")
def model(model_of):
    return model_of("qwen3")


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("loaders")
    (folder / "renames.mjs").write_text(
        "export default tensors => tensors.map(tensor => [tensor.name.replace(/^actor\\./, ''), tensor])"
    )
    (folder / "throws.mjs").write_text("export default async () => { throw new Error('not today') }")
    (folder / "outside.mjs").write_text(
        "export default ([tensor]) => [[tensor.name, tensor.view({ shape: [1 << 20] })]]"
    )
    flags = [*SMALL, "--tp", 2]
    for name in ["renames", "throws", "outside"]:
        flags += ["--weight-loader", f"{name}={folder / name}.mjs"]
    started = Server(model.folder, *flags, "--weight-loader", f"{SKYRL}={ROOT / 'examples/loaders/skyrl.mjs'}")
    yield started
    started.stop()


@pytest.fixture(autouse=True)
def given_back(server, nothing_left):
    yield
    gc.collect()
    assert metric(server, "tensor_files_opened_total") == metric(server, "tensor_files_closed_total")


def by_card(tensors):
    """vLLM's senders: the handles of all training ranks for a tensor, gathered by GPU."""
    return {card: reduce_tensor(tensor) for card, tensor in zip(CARDS, tensors)}


WAYS = {
    "bare (function, arguments)": lambda named: [(name, reduce_tensor(tensor)) for name, tensor in named],
    "a dict by name": dict,
    "a dict of bare pairs": lambda named: {name: reduce_tensor(tensor) for name, tensor in named},
    "one card": lambda named: [(name, by_card([tensor])) for name, tensor in named],
    "several cards": lambda named: [
        (name, by_card([tensor, tensor.clone(), tensor.clone()])) for name, tensor in named
    ],
}


@pytest.mark.parametrize("way", WAYS)
def test_forms_of_other_senders(server, model, way):
    post(server, "/weights_checker", {"action": "reset_tensors"})
    for variant in [1, 2, 1]:
        named = model.tensors(variant)
        entry = serialize(WAYS[way](named))
        gc.collect()
        files = shared_files()
        if way == "several cards":
            assert len(files) == 3 * len(named)
        update(server, [entry])
        # Only the request holds the copies. Handles that no rank used are returned as well.
        assert len(shared_files()) == len(named)
        assert all(file_count(file) == 1 for file in shared_files())
        assert checksums(server) == model.checksums(variant)


def test_values_that_are_no_tensors_are_refused_and_their_handles_returned(server, model):
    norm = "model.norm.weight"
    flat = torch.arange(128, dtype=torch.int64).to(torch.uint8)
    scalar = {
        "flattened_tensor": flat,
        "metadata": [FlattenedTensorMetadata(norm, torch.Size(()), torch.bfloat16, 0, 2, 2)],
    }
    before = checksums(server)
    cases = [
        ("zero dimensions", [(norm, torch.tensor(1.0, dtype=torch.bfloat16))], None, r"has shape \[\]"),
        ("zero elements", [(norm, torch.zeros(0, dtype=torch.bfloat16))], None, r"has shape \[0\]"),
        ("zero rows", [(norm, torch.zeros(0, 64, dtype=torch.bfloat16))], None, r"has shape \[0, 64\]"),
        ("a scalar of a bucket", scalar, "flattened_bucket", r"has shape \[\]"),
        (
            "cards without names",
            by_card([torch.zeros(64, dtype=torch.bfloat16)]),
            None,
            "names of tensors belong around them",
        ),
        ("int64", [(norm, torch.zeros(64, dtype=torch.int64))], None, "not one of weights"),
        ("complex", [(norm, torch.zeros(64, dtype=torch.complex64))], None, "is complex"),
        ("float8_e4m3fn", [(norm, torch.zeros(64).to(torch.float8_e4m3fn))], None, "float8_e4m3fn is a quantised one"),
        ("float8_e5m2", [(norm, torch.zeros(64).to(torch.float8_e5m2))], None, "float8_e5m2 is a quantised one"),
        (
            "qint8",
            [(norm, torch.quantize_per_tensor(torch.ones(64), 0.1, 0, torch.qint8))],
            None,
            "quantised|_rebuild_qtensor",
        ),
        (
            "an adapter",
            [("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", torch.zeros(4, 4))],
            None,
            "LoRA",
        ),
    ]
    for case, obj, load_format, says in cases:
        entry = serialize(obj)
        files = shared_files()
        with pytest.raises(Refused, match=says) as refused:
            update(server, [entry], load_format=load_format)
        assert refused.value.status == 400 and refused.value.body["success"] is False, case
        assert [file_count(file) for file in files] == [1] * len(files), case
        del obj
    cases.clear()
    assert checksums(server) == before


@pytest.fixture
def world():
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_sharded_tensors_are_refused_by_name_and_their_handles_returned(server, world):
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    before = checksums(server)
    mesh = init_device_mesh("cpu", (1,))

    def dtensor():
        return distribute_tensor(coded(1, "x", (64,)), mesh, [Shard(0)])

    def sharded():
        return sharded_tensor.zeros(ChunkShardingSpec(0, ["rank:0/cpu"]), 64, dtype=torch.bfloat16)

    for make, says in [
        (dtensor, r"full_tensor\(\)"),
        (lambda: torch.nn.Parameter(dtensor()), r"full_tensor\(\)"),
        (sharded, "ShardedTensor"),
    ]:
        tensor = make()
        entry = serialize([("model.norm.weight", tensor)])
        files = shared_files()
        assert files
        with pytest.raises(Refused, match=says) as refused:
            update(server, [entry])
        assert refused.value.status == 400
        assert [file_count(file) for file in files] == [1] * len(files), "its shard is given back"
        del tensor
        gc.collect()
    # The message suggests this way.
    tensor = dtensor()
    update(server, [serialize([("model.norm.weight", tensor.full_tensor())])])
    assert checksums(server) == before | {"model.norm.weight": checksum(coded(1, "x", (64,)))}
    del tensor
    # torch keeps the mesh alive: each DTensor carries the rank numbers of its mesh.
    (ranks,) = shared_files()
    assert (file_count(ranks), os.path.getsize(ranks)) == (1, 64 + 4)
    os.unlink(ranks)


def test_adapters_are_refused_and_their_handles_returned(server):
    adapter = {
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(4, 64),
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight": torch.zeros(64, 4),
    }
    for fields in [
        lambda: {"serialized_named_tensors": [serialize(adapter)] * 2},
        lambda: {"serialized_tensors": serialize(adapter)},
    ]:
        body = {"lora_name": "actor", "config_dict": {"r": 4}, **fields()}
        files = shared_files()
        assert [file_count(file) for file in files] == [2, 2]
        with pytest.raises(Refused) as refused:
            post(server, "/load_lora_adapter_from_tensors", body)
        assert refused.value.status == 400 and refused.value.body["success"] is False
        assert (
            'LoRA adapter "actor"' in refused.value.body["error_message"]
            and refused.value.body["loaded_adapters"] is None
        )
        assert [file_count(file) for file in files] == [1, 1]
    for path in ["/load_lora_adapter", "/unload_lora_adapter", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"]:
        with pytest.raises(Refused, match="actor") as refused:
            post(server, path, {"lora_name": "actor", "lora_path": "/nowhere"})
        assert refused.value.status == 400


class CudaIpcWeightUpdateRequest:
    """A dataclass like SkyRL's, pickled as it is."""

    def __init__(self, **fields):
        self.__dict__.update(fields)


def skyrl_tensor(request):
    data = base64.b64encode(dumps(request)) + b"__END_OF_REQUEST__"
    return torch.frombuffer(bytearray(data + b"\0" * (-len(data) % 4)), dtype=torch.uint8)


def test_the_loader_for_skyrl_reads_what_skyrl_packs_into_a_tensor(server, model):
    post(server, "/weights_checker", {"action": "reset_tensors"})
    for variant, packed in [(1, True), (2, False), (1, True)]:
        named, buffer = model.tensors(variant), None
        fields = dict(
            names=[name for name, _ in named],
            dtypes=["torch.bfloat16"] * len(named),
            shapes=[list(tensor.shape) for _, tensor in named],
        )
        if packed:
            buffer = torch.cat([tensor.flatten() for _, tensor in named])
            request = CudaIpcWeightUpdateRequest(
                **fields, sizes=[tensor.numel() for _, tensor in named], ipc_handles=by_card([buffer, buffer.clone()])
            )
        else:
            request = dict(fields, extras=[{"ipc_handles": by_card([tensor])} for _, tensor in named])
        entry = serialize([("ipc_request", skyrl_tensor(request))])
        del request
        gc.collect()
        reply = update(server, [entry] * 2, load_format=SKYRL, weight_version=str(variant))
        assert reply["report"]["missing"] == []
        assert checksums(server) == model.checksums(variant)
        assert len(shared_files()) == (1 if packed else len(named)), "what the trainer still holds"


def test_a_loader_renames_tensors_and_its_errors_are_refusals_that_name_it(server, model):
    named = [(f"actor.{name}", tensor) for name, tensor in model.tensors(4)]
    update(server, [serialize(named)], load_format="renames")
    assert checksums(server) == model.checksums(4)
    for load_format, says in [
        ("throws", 'weight loader "throws": it failed: not today'),
        ("outside", 'weight loader "outside": .*but its storage has'),
        ("nobody", "got .*nobody"),
        ("renames", "no tensor"),
    ]:
        tensor = coded(1, "x", [64])
        entry = serialize([("actor.nobody", tensor)])
        files = [path for path in shared_files() if file_count(path) == 2]
        assert len(files) == 1
        with pytest.raises(Refused) as refused:
            update(server, [entry], load_format=load_format)
        message = refused.value.body["message"].replace('\\"', '"')
        assert refused.value.status == 400 and re.search(says, message), message
        assert file_count(files[0]) == 1, load_format
    assert checksums(server) == model.checksums(4)


def test_the_numbers_of_threads_and_mappings_do_not_grow(server, model, pytestconfig):
    pid, mine = server.process.pid, os.getpid()

    def step(variant):
        named = model.tensors(variant % 2)
        ways = [
            lambda: update(server, [serialize(bucket(named))] * 2, load_format="flattened_bucket"),
            lambda: update(server, [serialize([(name, by_card([tensor, tensor.clone()])) for name, tensor in named])]),
            lambda: update(
                server, [serialize([(f"actor.{name}", tensor) for name, tensor in named])], load_format="renames"
            ),
        ]
        ways[variant % 3]()
        with pytest.raises(Refused):
            update(server, [serialize([("actor.x", named[0][1])])], load_format="throws")

    for variant in range(12):
        step(variant)
    gc.collect()

    def held():
        return descriptors(pid), descriptors(mine), threads(pid), threads(mine), mappings(pid), mappings(mine)

    before = held()
    memory = resident(pid), resident(mine)
    for variant in range(4 * pytestconfig.getoption("--rounds")):
        step(variant)
        gc.collect()
        assert shared_files() == []
    more = grown(held, before)
    assert not more, f"before and after: {more}"
    assert mappings(pid) == 0
    assert resident(pid) - memory[0] < 64 << 20 and resident(mine) - memory[1] < 32 << 20


SENDER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from tensors import *
big = [(f"actor.{i}", torch.zeros(1 << 16, dtype=torch.bfloat16)) for i in range(200)]
named = [("model.norm.weight", coded(9, "x", [64]))]
print(serialize(named), flush=True)
print(serialize(big), flush=True)
time.sleep(600)
"""


def test_a_sender_that_is_killed_after_its_update_or_while_its_body_is_on_the_way(server):
    sender = subprocess.Popen(
        [sys.executable, "-c", SENDER, str(ROOT / "test/interop")], stdout=subprocess.PIPE, text=True
    )
    good, big = sender.stdout.readline().strip(), sender.stdout.readline().strip()
    update(server, [good])
    expected = checksums(server)
    assert expected["model.norm.weight"] == checksum(coded(9, "x", [64]))
    # The request and the end of its sender race. In either order the reply matches and nothing stays open.
    outcomes = []

    def send():
        try:
            outcomes.append(update(server, [big]))
        except Refused as refused:
            outcomes.append(refused)

    thread = threading.Thread(target=send)
    thread.start()
    sender.send_signal(signal.SIGKILL)
    sender.wait()
    sender.stdout.close()
    thread.join()
    assert isinstance(outcomes[0], Refused) and outcomes[0].status == 400, outcomes
    assert gone(sender.pid)
    assert checksums(server) == expected
