"""/update_weights_from_tensor with wrong or hostile requests and dying senders: refusals change and leak nothing."""

import base64
import gc
import json
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import threading

import pytest
import torch
from leaks import gone
from server import settled
from tensors import (
    ROOT,
    LocalSerializedTensor,
    Refused,
    checksum,
    checksums,
    coded,
    dumps,
    file_count,
    metric,
    post,
    serialize,
    shared_files,
    update,
)

pytestmark = pytest.mark.usefixtures("nothing_left")


def test_a_refused_request_returns_every_reference(served):
    server, model = served("qwen3", 2)
    before = checksums(server)
    name = "model.norm.weight"

    def good():
        return coded(1, name, [64])

    cases = {
        "unknown name": ({}, lambda: [("nobody", good())]),
        "shape": ({}, lambda: [(name, coded(1, name, [65]))]),
        "dtype": ({}, lambda: [(name, good().double())]),
        "twice": ({}, lambda: [(name, good()), (name, good())]),
        "expanded": ({}, lambda: [(name, good()[:1].expand(64))]),
        "overlapping rows": (
            {},
            lambda: [("model.layers.0.mlp.up_proj.weight", coded(1, name, [1024]).as_strided((128, 64), (1, 1)))],
        ),
        "load_format": ({"load_format": "my.loader"}, lambda: [(name, good())]),
        "not a bucket": ({"load_format": "flattened_bucket"}, lambda: [(name, good())]),
        "a field": ({"weight_version": 3}, lambda: [(name, good())]),
        "flush_cache": ({"flush_cache": None}, lambda: [(name, good())]),
    }
    for case, (fields, make) in cases.items():
        named = make()
        entry = serialize(named)
        files = shared_files()
        assert files and [file_count(file) for file in files] == [2] * len(files)
        with pytest.raises(Refused) as refused:
            update(server, [entry], **fields)
        assert refused.value.status == 400 and refused.value.body["success"] is False, case
        assert [file_count(file) for file in files] == [1] * len(files), case
        del named
        gc.collect()
    # Too few entries, and more entries than are read.
    with pytest.raises(Refused, match="one per tensor-parallel rank"):
        update(server, [])
    tensor = coded(4, name, [64])
    tensors = [tensor.clone() for _ in range(5)]
    entries = [serialize([(name, own)]) for own in tensors]
    assert [file_count(file) for file in shared_files()] == [2] * 5
    update(server, entries)
    assert [file_count(file) for file in shared_files()] == [1] * 5
    del tensors
    assert checksums(server) == before | {name: checksum(tensor)}


def test_memory_that_its_sender_has_released_is_read_and_removed(served):
    server, model = served("qwen3", 1)
    entry = serialize(model.tensors(11))
    gc.collect()
    assert all(file_count(file) == 1 for file in shared_files()), "only the request holds it"
    update(server, [entry])
    assert shared_files() == []
    assert checksums(server) == model.checksums(11)
    with pytest.raises(Refused, match="does not exist: the sender has ended or freed it"):
        update(server, [entry])
    assert checksums(server) == model.checksums(11)


SENDER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from tensors import *
import json
shapes = json.loads(sys.argv[2])
named = [(name, coded(13, name, shape)) for name, shape in shapes.items()]
print(serialize(named), flush=True)
time.sleep(600)
"""


def test_a_sender_that_dies_before_its_request_is_refused_and_one_that_dies_during_it_is_not(served):
    server, model = served("qwen3", 2)
    before = checksums(server)

    def start():
        arguments = [sys.executable, "-c", SENDER, str(ROOT / "test/interop"), json.dumps(model.shapes)]
        sender = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
        return sender, sender.stdout.readline().strip()

    def kill(sender):
        sender.send_signal(signal.SIGKILL)
        sender.wait()
        sender.stdout.close()

    sender, entry = start()
    kill(sender)
    assert gone(sender.pid)
    with pytest.raises(Refused, match="the sender has ended"):
        update(server, [entry])
    assert checksums(server) == before

    # The server opens the memory before it closes the gate. The sender dies while the update waits for a rollout.
    sender, entry = start()
    opened = metric(server, "tensor_files_opened_total")
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}}
    rollout = threading.Thread(target=lambda: post(server, "/generate", body))
    rollout.start()
    replies = []
    request = threading.Thread(target=lambda: replies.append(update(server, [entry])))
    request.start()
    settled(lambda: metric(server, "tensor_files_opened_total"), lambda count: count > opened or not request.is_alive())
    kill(sender)
    request.join()
    rollout.join()
    assert len(replies) == 1 and checksums(server) == model.checksums(13)
    assert gone(sender.pid)
    assert metric(server, "tensor_files_opened_total") == metric(server, "tensor_files_closed_total")


def test_a_name_in_shared_memory_that_is_not_torchs_is_not_touched(served, tmp_path):
    server, _ = served("qwen3", 1)
    for hostile in [
        "/../etc/passwd",
        "/etc/passwd",
        "/torch_1_2_3/../../x",
        "torch_1_2_3",
        "/torch_x",
        "/torch_1_2_3\0",
    ]:
        entry = dumps([("model.norm.weight", coded(1, "x", [64]))])
        (file,) = shared_files()
        name = b"/" + pathlib.Path(file).name.encode()
        at = entry.index(name)
        replaced = entry[: at - 1] + bytes([len(hostile)]) + hostile.encode() + entry[at + len(name) :]
        with pytest.raises(Refused) as refused:
            update(server, [base64.b64encode(replaced).decode()])
        assert refused.value.body["error"]["code"] in ("TENSOR_PAYLOAD", "PICKLE_MALFORMED"), hostile
        # The pickle does not name this file any more, so the server does not return its reference.
        pathlib.Path(file).unlink()
    # A file that is shorter than announced; a link; a folder.
    for make in [
        lambda path: path.write_bytes(b"\0" * 100),
        lambda path: path.symlink_to("/etc/passwd"),
        lambda path: path.mkdir(),
    ]:
        entry = serialize([("model.norm.weight", coded(1, "x", [64]))])
        path = pathlib.Path(*shared_files())
        path.unlink()
        make(path)
        with pytest.raises(Refused) as refused:
            update(server, [entry])
        assert refused.value.body["error"]["code"] == "TENSOR_PAYLOAD"
        path.rmdir() if path.is_dir() else path.unlink()


class Runs:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_a_pickle_runs_no_code(served, tmp_path):
    server, model = served("qwen3", 2)
    before = checksums(server)
    sign = tmp_path / "executed"
    bodies = [
        [pickle.dumps(Runs(sign))],
        [dumps([("model.norm.weight", Runs(sign))])],
        [dumps({"flattened_tensor": Runs(sign), "metadata": []})],
        [dumps([("model.norm.weight", LocalSerializedTensor([pickle.dumps(Runs(sign))] * 2))])],
        [b""],
        [b"\x80\x04."],
        [b"\x80\x04" + b"(" * 100_000 + b"."],
        [dumps(list(range(100_000)))],
        [os.urandom(5000)],
    ]
    recorded = json.loads((ROOT / "test/fixtures/pickles/exploits.json").read_text())
    entries = [[base64.b64encode(part).decode() for part in body] for body in bodies] + [
        [case["pickle"]] for case in recorded
    ]
    for entry in [*entries, ["not base64!"], ["gASV"], [""]]:
        for load_format in [None, "flattened_bucket", "direct"]:
            with pytest.raises(Refused) as refused:
                update(server, entry * 2, load_format=load_format)
            assert refused.value.status == 400 and refused.value.body["error"]["code"] != "INTERNAL", refused.value
    for body in [
        b"{",
        b"[]",
        b"null",
        b'{"serialized_named_tensors": "gASV"}',
        b'{"serialized_named_tensors": [1]}',
        b"{}",
        b'{"serialized_named_tensors": null}',
    ]:
        with pytest.raises(Refused) as refused:
            post(server, "/update_weights_from_tensor", body)
        assert refused.value.status == 400
    # The recorded exploits touch this file.
    assert not sign.exists() and not os.path.exists("/tmp/refit-pickle-was-run")
    assert checksums(server) == before
    update(server, [serialize(model.tensors(1))])
    assert checksums(server) == model.checksums(1)


def test_descriptors_and_gpu_handles_are_refused_with_the_reason(served):
    server, _ = served("qwen3", 1)
    torch.multiprocessing.set_sharing_strategy("file_descriptor")
    try:
        with pytest.raises(Refused, match=r'set_sharing_strategy\(\\?"file_system\\?"\)'):
            update(server, [serialize([("model.norm.weight", coded(1, "x", [64]))])])
    finally:
        torch.multiprocessing.set_sharing_strategy("file_system")
    recorded = json.loads((ROOT / "test/fixtures/pickles/payloads.json").read_text())
    cuda = next(
        case
        for case in recorded
        if case["load_format"] is None
        and not case["any_dtype"]
        and case["expected"]["storages"]
        and all(storage["kind"] == "cuda" for storage in case["expected"]["storages"])
    )
    with pytest.raises(Refused, match="this engine is on the CPU"):
        update(server, cuda["entries"])
