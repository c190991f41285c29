"""checkpoint-engine: an HTTP request names the ZeroMQ sockets, and the weights pass through one buffer for each GPU."""

import gc
import json
import os
import pathlib
import pickle
import subprocess
import sys
import threading
import time

import pytest
import torch
from checkpoint_requests import BUCKET, devices, files_left, served, sglang, vllm
from engines import DEVICES, GOLDENS, Beside, refusal, settled
from parameter_server import ParameterServer, WorkersFailed
from server import Refused
from tensor_process import shared_files
from zmq_req import KINDS

SGLANG = pytest.mark.row(29, "checkpoint-engine / SGLang")
VLLM = pytest.mark.row(28, "checkpoint-engine / vLLM")


@pytest.fixture(autouse=True)
def nothing_left():
    gc.collect()
    before = set(shared_files(os.getpid()))
    yield
    gc.collect()
    left = settled(lambda: files_left() - before, lambda left: not left)
    assert not left, "the sender's memory is free once it is done"


@SGLANG
@pytest.mark.brings("memory")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_go_to_a_to_b_and_back_to_a(engines, ranks, device, kind):
    """One buffer for the GPU of all ranks. The buckets alternate between its halves."""
    engine = served(engines, ranks, device, on_one_card=True)
    server = ParameterServer(devices(device, 1), BUCKET, kind=kind)
    engine.spoil()
    for step, variant in enumerate([1, 2, 1]):
        reply = server.update(engine.tensors(variant), sglang(engine, version=f"step-{step}"))
        assert (
            reply["success"] is True
            and reply["message"] == f"IPC weight update completed successfully. Weight version updated to step-{step}."
        )
        assert reply["report"]["tensors"] == len(engine.shapes) and reply["report"]["missing"] == []
        engine.holds(variant)
        assert engine.version() == f"step-{step}"
    assert engine.tokens()["meta_info"]["weight_version"] == "step-2"


@SGLANG
@pytest.mark.brings("memory")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cards(2))])
def test_every_rank_reads_the_buffer_of_its_own_gpu(engines, device):
    """Each rank of the parameter server has its own buffer with equal content, and waits for the replies to all ranks.
    """
    engine = served(engines, 2, device)
    engine.spoil()
    server = ParameterServer(devices(device, 2), BUCKET)
    for variant in [3, 4]:
        server.update(engine.tensors(variant), sglang(engine))
        engine.holds(variant)


@VLLM
@pytest.mark.brings("memory")
@pytest.mark.parametrize("device", DEVICES)
def test_the_form_of_vllm(engines, device):
    """POST /collective_rpc; the sender reads only the reply's status. The map has other engines' sockets as well."""
    engine = served(engines, 1, device)
    engine.spoil()
    ParameterServer(devices(device, 1), BUCKET).update(engine.tensors(5), vllm(engine))
    engine.holds(5)
    if device == "cuda":
        others = {"GPU-00000000-0000-0000-0000-000000000000": "ipc://@somebody-elses.sock"}
        ParameterServer(["cuda:0"], BUCKET).update(
            engine.tensors(6), lambda sockets: vllm(engine)({**others, **sockets})
        )
        engine.holds(6)


@SGLANG
@VLLM
@pytest.mark.brings("memory")
def test_the_request_stays_open_and_nothing_is_generated_from_a_mixture(engines):
    engine = served(engines)
    ParameterServer(bucket_bytes=BUCKET).update(engine.tensors(1), sglang(engine, version="old"))
    server, reached, go = ParameterServer(bucket_bytes=BUCKET), threading.Event(), threading.Event()

    def hold(rank, what, index):
        if (what, index) == ("bucket", 2):
            reached.set()
            assert go.wait(60)

    server.change = hold
    call = Beside(lambda: server.update(engine.tensors(2), sglang(engine, version="new")))
    assert reached.wait(60)
    # Two buckets are written, and the other weights are still the old ones.
    asked = Beside(lambda: engine.tokens())
    time.sleep(0.3)
    assert not asked.done and not call.done, "a request waits for the end of the update"
    assert engine.version() == "old"
    assert engine.get("/server_info")["weight_transaction"]["owner"].startswith(
        "checkpoint-engine (ipc://@checkpoint-engine-cpu-"
    )
    with refusal(409) as refused:
        engine.post("/update_weights_from_disk", dict(model_path=str(GOLDENS / engine.kind)))
    assert "TRANSACTION_OPEN" in refused["body"]
    go.set()
    assert call.result()["success"] is True
    assert asked.result()["meta_info"]["weight_version"] == "new"
    engine.holds(2)


@SGLANG
def test_the_cache_is_flushed_unless_the_request_keeps_it(engines):
    engine = served(engines)
    server = ParameterServer(bucket_bytes=1 << 20)
    prompt = list(range(5, 69))

    def cached():
        body = dict(input_ids=prompt, sampling_params=dict(max_new_tokens=1))
        engine.post("/generate", body)
        return engine.post("/generate", body)["meta_info"]["cached_tokens"]

    for flush in [True, False]:
        assert cached() > 0
        server.update(engine.tensors(1), sglang(engine, flush_cache=flush))
        assert (
            engine.post("/generate", dict(input_ids=prompt, sampling_params=dict(max_new_tokens=1)))["meta_info"][
                "cached_tokens"
            ]
            == 0
        ), "of other weights in any case"


@SGLANG
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bucket", [0, 2, -1])
def test_a_refused_bucket_gets_the_reason_and_another_update_repairs_the_weights(engines, device, bucket):
    """The parameter server stops all ranks, and the engine names the torn weights.

    It ignores the last bucket's reply.
    """
    engine = served(engines, 1, device)
    server = ParameterServer(devices(device, 1), BUCKET)
    server.update(engine.tensors(1), sglang(engine, version="good"))
    named = engine.tensors(2)
    at = {0: 0, 2: len(named) // 2, -1: len(named)}[bucket]
    named.insert(at, ("model.no_such.weight", torch.zeros(BUCKET // 2, dtype=torch.bfloat16)))
    replies = []

    def request(sockets):
        try:
            return sglang(engine, version="bad")(sockets)
        except Refused as error:
            replies.append(error)

    with pytest.raises(WorkersFailed, match="IPC weight update failed: .*model.no_such.weight"):
        server.update(named, request)
    (error,) = replies
    body = json.loads(error.body)
    assert (
        body["success"] is False
        and "model.no_such.weight" in body["message"]
        and body["message"].startswith("IPC weight update failed: ")
    )
    assert engine.version() == "good"
    state = engine.get("/server_info")["weights"]
    if bucket == 0:
        assert error.status == 400 and state == "current"
        engine.holds(1)
    elif bucket == -1:
        assert state == "current", "all of the model had been written; the label has not moved"
        engine.holds(2)
    else:
        assert error.status == 500 and body["error"]["code"] == "WEIGHTS_TORN" and state == "torn"
        with refusal(503):
            engine.tokens()
    server.update(engine.tensors(3), sglang(engine, version="healed"))
    engine.holds(3)
    assert engine.version() == "healed"
    assert len(engine.tokens()["output_ids"]) == 4


@SGLANG
@pytest.mark.parametrize("which", [0, 1])
def test_an_error_of_one_rank_stops_all(engines, which):
    """checkpoint-engine sends an exception to all workers. Here one rank of the parameter server sends it alone."""
    engine = served(engines, 2)
    # The plain socket: libzmq does not report that the engine has closed the connection.
    server = ParameterServer(["cpu", "cpu"], BUCKET, kind="plain")
    server.update(engine.tensors(1), sglang(engine))

    def stop(rank, what, index):
        if (what, index) == ("bucket", 1):
            return pickle.dumps(RuntimeError("Some workers failed to update weights"), -1) if rank == which else None

    server.change = stop
    with pytest.raises(Exception) as caught:
        server.update(engine.tensors(2), sglang(engine))
    assert caught.value is not None
    info = settled(lambda: engine.get("/server_info"), lambda info: info["weight_transaction"] is None)
    assert info["weight_transaction"] is None and info["weights"] == "torn"
    server.change = lambda *_: None
    server.update(engine.tensors(3), sglang(engine))
    engine.holds(3)


MESSAGES = {
    "no pickle": ("handle", b"hello", "PICKLE_MALFORMED"),
    "code": ("handle", b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x0ctouch /tmp/x\x85R.", "PICKLE_REFUSED"),
    "no buffer": ("handle", pickle.dumps((1, 2), -1), "TENSOR_PAYLOAD"),
    "code for a bucket": ("bucket", b"\x80\x04]\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85Ra.", "TENSOR_PAYLOAD"),
    "outside of the buffer": (
        "bucket",
        pickle.dumps(
            [dict(name="model.norm.weight", dtype=torch.bfloat16, shape=torch.Size([64]), offset=1 << 30)], -1
        ),
        "TENSOR_PAYLOAD",
    ),
    "a dtype of no weight": (
        "bucket",
        pickle.dumps([dict(name="model.norm.weight", dtype=torch.int32, shape=torch.Size([64]), offset=0)], -1),
        "TENSOR_PAYLOAD",
    ),
    "more than was asked for": ("bucket", pickle.dumps(7, -1), "TENSOR_PAYLOAD"),
}


@SGLANG
@pytest.mark.parametrize("case", MESSAGES)
def test_messages_are_data_and_are_checked(engines, case):
    engine = served(engines)
    server = ParameterServer(bucket_bytes=BUCKET)
    server.update(engine.tensors(1), sglang(engine))
    where, data, code = MESSAGES[case]
    server.change = lambda rank, what, index: data if (what, index) == (where, 0) else None
    replies = []

    def request(sockets):
        try:
            sglang(engine)(sockets)
        except Refused as error:
            replies.append(error)

    with pytest.raises(WorkersFailed, match="IPC weight update failed: "):
        server.update(engine.tensors(2), request)
    assert json.loads(replies[0].body)["error"]["code"] == code, replies[0].body
    engine.holds(1)
    assert engine.get("/server_info")["weights"] == "current"


@SGLANG
def test_only_sockets_of_this_machine_are_used(engines, tmp_path):
    engine = served(engines)
    post = sglang(engine)
    for endpoint in [
        "tcp://127.0.0.1:5555",
        "ipc://relative.sock",
        "inproc://x",
        "ipc://@",
        "ipc://@" + "x" * 200,
        "http://x",
    ]:
        with refusal(400) as refused:
            post({"cpu": endpoint})
        assert "zmq_handles" in refused["body"] or "endpoint" in refused["body"]
    for handles in [{}, {"a": "ipc://@a", "b": "ipc://@b"}]:
        with refusal(400):
            post(handles)
    with refusal(400):
        engine.post("/update_weights_from_ipc", {})
    # A socket in the file system works as well.
    ParameterServer(bucket_bytes=BUCKET, path=str(tmp_path / "{key}-{counter}.sock")).update(engine.tensors(2), post)
    engine.holds(2)


@SGLANG
def test_a_parameter_server_that_does_not_exist_is_a_timeout(engines, tmp_path):
    """A path of a file that is no socket gets the same reply: it must not tell which paths exist."""
    engine = served(engines)
    (tmp_path / "file").write_text("")
    for endpoint in ["ipc://@nobody-binds-this.sock", f"ipc://{tmp_path}/missing", f"ipc://{tmp_path}/file"]:
        with refusal(502) as refused:
            engine.post("/update_weights_from_ipc", dict(zmq_handles={"cpu": endpoint}, timeout=1))
        assert "ZMQ_UNREACHABLE" in refused["body"] or "DEADLINE" in refused["body"]


VICTIM = """
import os, sys, threading
sys.path[:0] = {path!r}
import torch
from parameter_server import ParameterServer
server = ParameterServer({devices!r}, {bucket}, keys={keys!r})
def change(rank, what, index):
    if (what, index) == ("bucket", 2):
        os.kill(os.getpid(), 9)
server.change = change
from tensors import coded
named = [(name, coded(2, name, shape)) for name, shape in {shapes!r}]
def request(sockets):
    print(next(iter(sockets.values())), flush=True)
    import time; time.sleep(600)
server.update(named, request)
"""


@SGLANG
@pytest.mark.parametrize("device", DEVICES)
def test_a_parameter_server_that_is_killed_is_noticed_at_once(engines, device):
    """The engine opens the gate again. Tensors that were written in part are torn."""
    engine = served(engines, 1, device)
    ParameterServer(devices(device, 1), BUCKET).update(engine.tensors(1), sglang(engine))
    keys = ["cpu"] if device == "cpu" else None
    source = VICTIM.format(
        path=sys.path,
        devices=devices(device, 1),
        bucket=BUCKET,
        keys=keys,
        shapes=[(n, tuple(s)) for n, s in engine.shapes.items()],
    )
    with subprocess.Popen(
        [sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as victim:
        endpoint = victim.stdout.readline().strip()
        key = "cpu" if device == "cpu" else ParameterServer(["cuda:0"]).keys[0]
        with refusal(500) as refused:
            engine.post("/update_weights_from_ipc", dict(zmq_handles={key: endpoint}))
        assert "WEIGHTS_TORN" in refused["body"] and "closed the connection" in refused["body"], refused["body"]
        victim.kill()
    # torch's shm manager removes files at the same time.
    for path in shared_files(victim.pid):
        pathlib.Path(path).unlink(missing_ok=True)
    ParameterServer(devices(device, 1), BUCKET).update(engine.tensors(3), sglang(engine))
    engine.holds(3)


@SGLANG
def test_an_update_belongs_to_the_open_transaction(engines):
    engine = served(engines)
    ParameterServer(bucket_bytes=BUCKET).update(engine.tensors(1), sglang(engine, version="before"))
    engine.post("/begin_weight_update")
    reply = ParameterServer(bucket_bytes=BUCKET).update(engine.tensors(2), sglang(engine, version="scoped"))
    assert "Weight version will be scoped when its transaction ends" in reply["message"]
    assert engine.version() == "before"
    engine.post("/end_weight_update")
    assert engine.version() == "scoped"
    engine.holds(2)


@SGLANG
@pytest.mark.cards(1)
@pytest.mark.brings("memory")
def test_gpu_memory_is_released(engines):
    engine = served(engines, 1, "cuda")
    server = ParameterServer(["cuda:0"], 64 << 20)
    for variant in range(1, 12):
        server.update(engine.tensors(variant), sglang(engine))
        gc.collect()
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() < 64 << 20, f"update {variant}: the buffer is not free"
    engine.holds(11)


@SGLANG
def test_descriptors_are_closed(engines):
    engine = served(engines)
    server = ParameterServer(bucket_bytes=BUCKET)

    def footprint():
        return len(os.listdir(f"/proc/{engine.process.pid}/fd"))

    server.update(engine.tensors(1), sglang(engine))
    before = settled(footprint, lambda _: False, 1)
    for variant in range(5):
        server.update(engine.tensors(variant), sglang(engine))
    assert settled(footprint, lambda now: now <= before) <= before
