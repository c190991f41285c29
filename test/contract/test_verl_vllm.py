"""verl with vLLM: a worker on each GPU of the engine binds a ZeroMQ socket and sends buckets through one buffer.

The actor starts the engine's receiver meanwhile. With the shim's actor refit is the receiver.
"""

import gc
import io
import os
import pathlib
import pickle
import uuid
from multiprocessing import shared_memory
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch.multiprocessing.reductions import reduce_tensor

from engines import DEVICES, Beside, refusal
from tensor_process import shared_files
from test_shims import actor_of, error_of, get, ray, refit_verl, rollout_config  # noqa: F401
from zmq_req import Req

VLLM = pytest.mark.row(11, "verl / vLLM")
BUCKET = 40 << 10


def dumps(message):
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(message)
    return buffer.getvalue()


class Sender:
    """verl's BucketedWeightSender: a REQ socket, the buffer, the buckets, and larger tensors alone.

    It ignores replies.
    """

    def __init__(self, endpoint, device, use_shm):
        self.endpoint, self.device, self.use_shm, self.shm, self.buckets = endpoint, device, use_shm, None, 0

    def ask(self, message):
        self.socket.send(pickle.dumps(message) if self.use_shm else dumps(message))
        self.socket.recv()

    def send(self, weights, spoil=None):
        path = pathlib.Path(self.endpoint[len("ipc://") :])
        path.unlink(missing_ok=True)
        self.socket = Req(self.endpoint)
        try:
            if self.use_shm:
                self.shm = shared_memory.SharedMemory(name=f"verl_weights_{uuid.uuid4().hex}", create=True, size=BUCKET)
                buffer = torch.frombuffer(self.shm.buf, dtype=torch.uint8)
                self.ask(dict(name=self.shm.name, size=BUCKET))
            else:
                buffer = torch.empty(BUCKET, dtype=torch.uint8, device=self.device)
                self.ask(reduce_tensor(buffer))
            meta, offset = {}, 0
            for name, weight in weights:
                if offset + weight.nbytes > BUCKET and meta:
                    self.bucket(meta, False, spoil)
                    meta, offset = {}, 0
                if weight.nbytes > BUCKET:
                    assert not self.use_shm, f"{name} is larger than the buffer"
                    self.bucket(
                        {
                            name: dict(
                                name=name,
                                shape=weight.shape,
                                dtype=weight.dtype,
                                offset=0,
                                handle=reduce_tensor(weight),
                            )
                        },
                        False,
                    )
                    continue
                meta[name] = dict(name=name, shape=weight.shape, dtype=weight.dtype, offset=offset, handle=None)
                buffer[offset : offset + weight.nbytes].view(weight.dtype).view(weight.shape).copy_(weight)
                offset += weight.nbytes
            self.bucket(meta, True, spoil)
        finally:
            self.socket.close()
            path.unlink(missing_ok=True)
            buffer = None
            gc.collect()
            if self.shm is not None:
                self.shm.close()
                self.shm.unlink()
            if self.device != "cpu":
                torch.cuda.ipc_collect()

    def bucket(self, meta, is_last, spoil=None):
        if self.device != "cpu":
            torch.cuda.synchronize()
        meta = spoil(self.buckets, meta) if spoil else meta
        self.buckets += 1
        self.ask(dict(bucket_meta=meta, is_last=is_last))


class Workers:
    """verl's workers, one for each rank of the engine. The first one calls the actor."""

    def __init__(self, engine, actor, device, use_shm):
        self.engine, self.actor, self.device, self.use_shm, self.replica = engine, actor, device, use_shm, 0

    def endpoint(self, rank):
        job = ray.get_runtime_context().get_job_id() if ray else "0"
        return f"ipc:///tmp/rl-colocate-zmq-{job}-replica-{self.replica}-rank-{rank}.sock"

    def update(self, weights, step, spoil=None, **kwargs):
        future = self.actor.collective_rpc.remote(
            "update_weights_from_ipc", timeout=None, args=(), kwargs={**kwargs, "use_shm": self.use_shm}
        )
        senders = [
            Sender(
                self.endpoint(rank),
                self.device if self.device == "cpu" else f"cuda:{rank % torch.cuda.device_count()}",
                self.use_shm,
            )
            for rank in range(self.engine.ranks)
        ]
        sent = [
            Beside(
                lambda sender=sender: sender.send([(name, tensor.to(sender.device)) for name, tensor in weights], spoil)
            )
            for sender in senders
        ]
        for one in sent:
            one.result()
        get(future)
        get(self.actor.clear_kv_cache.remote())
        get(self.actor.set_global_steps.remote(step))
        return senders

    def round(self, weights, step):
        """Hybrid: memory is released for the training, the weights' resumed for the update and the cache's after it."""
        get(self.actor.wait_for_requests_to_drain.remote())
        get(self.actor.sleep.remote())
        assert self.engine.get("/health")["status"] == "asleep"
        get(self.actor.wake_up.remote(tags=["weights"]))
        senders = self.update(weights, step)
        get(self.actor.wake_up.remote(tags=["kv_cache"]))
        return senders


WAYS = [
    ("cpu", True),
    *[pytest.param(device.values[0], False, marks=device.marks) for device in DEVICES if not isinstance(device, str)],
]


@pytest.fixture
def workers_of(engines, actor_of):  # noqa: F811
    def make(ranks, device, use_shm):
        env = {"REFIT_CUDA_SHARE_CARD": "1"} if device == "cuda" and ranks > torch.cuda.device_count() else None
        engine = engines("qwen3-moe", ranks, device, env=env)
        actor = actor_of(refit_verl.RefitServer, config=rollout_config(), url=engine.url, ranks=ranks)
        get(actor.launch_server.remote(master_address=None, master_port=None))
        return Workers(engine, actor, device, use_shm)

    return make


def shm_left():
    return set(pathlib.Path("/dev/shm").glob("verl_weights_*"))


@VLLM
@pytest.mark.brings("memory")
@pytest.mark.parametrize("device, use_shm", WAYS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_buckets_of_all_workers_are_one_update_between_the_wake_ups(workers_of, ranks, device, use_shm):
    workers = workers_of(ranks, device, use_shm)
    engine, before, mine = workers.engine, shm_left(), set(shared_files(os.getpid()))
    for step, variant in enumerate((1, 2, 1), 1):
        senders = workers.round(engine.tensors(variant), step)
        assert all(sender.buckets > 3 for sender in senders)
        engine.holds(variant)
        assert engine.version() == str(step)
        output = get(
            workers.actor.generate.remote(
                prompt_ids=[1, 2, 3],
                sampling_params=dict(temperature=0.0, logprobs=True, max_tokens=4),
                request_id=f"r{step}-{ranks}",
            )
        )
        assert 1 <= len(output.token_ids) == len(output.log_probs) and output.extra_fields["global_steps"] == step
    # Without a memory release: whole weights in float32, as verl's engines export them.
    workers.update([(name, tensor.float()) for name, tensor in engine.tensors(3) if tensor.nbytes * 2 <= BUCKET], 4)
    small = [name for name, tensor in engine.tensors(3) if tensor.nbytes * 2 <= BUCKET]
    engine.holds(3, small)
    assert shm_left() <= before
    gc.collect()
    assert set(shared_files(os.getpid())) <= mine


@VLLM
@pytest.mark.cards(1)
@pytest.mark.brings("memory")
def test_a_tensor_larger_than_the_buffer_has_its_own_handle(workers_of):
    workers = workers_of(1, "cuda", False)
    weights = dict(workers.engine.tensors(5))
    name = max(weights, key=lambda name: weights[name].nbytes)
    assert weights[name].float().nbytes > BUCKET, "the largest tensor does not fit the buffer"
    workers.update([(each, tensor.float() if each == name else tensor) for each, tensor in weights.items()], 5)
    workers.engine.holds(5)


@VLLM
@pytest.mark.brings("memory")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_bad_bucket_fails_the_call_and_leaves_no_worker_waiting(workers_of, ranks):
    """The sender ignores replies and sends all buckets.

    The engine receives and drops them, and names the torn tensors.
    """
    workers = workers_of(ranks, "cpu", True)
    engine = workers.engine
    workers.update(engine.tensors(1), 1)

    def renamed(at, wrong):
        return lambda index, meta: (
            {
                f"model.no_such.{name}" if wrong == "name" else name: {
                    **entry,
                    **({"offset": BUCKET} if wrong == "offset" else {"name": f"model.no_such.{name}"}),
                }
                for name, entry in meta.items()
            }
            if index == at
            else meta
        )

    for at, wrong, words in [(0, "name", "no_such"), (0, "offset", "the buffer has"), (2, "name", "no_such")]:
        with pytest.raises(Exception, match=f"(?s){words}"):
            workers.update(engine.tensors(2), 2, renamed(at, wrong))
        if at == 0:
            engine.holds(1)
            assert engine.get("/server_info")["weights"] == "current"
    assert engine.get("/health")["status"] == "torn"
    workers.update(engine.tensors(1), 3)
    engine.holds(1)
    assert shm_left() == set()


@VLLM
def test_other_calls_of_a_vllm_worker_are_refused_with_the_reason(workers_of):
    workers = workers_of(1, "cpu", True)
    assert "monkey_patch_model" in error_of(
        workers.actor.collective_rpc.remote("monkey_patch_model", kwargs=dict(vocab_size=1))
    )
    adapter = error_of(
        workers.actor.collective_rpc.remote(
            "update_weights_from_ipc", kwargs=dict(peft_config=dict(r=2), base_sync_done=True)
        )
    )
    assert "merge=True" in adapter and "rollout.name=sglang" in adapter
    engine = workers.engine
    with refusal(400) as found:
        engine.post("/update_weights_from_ipc", dict(zmq_handles={"0": "tcp://127.0.0.1:5555"}))
    assert "same machine" in found["body"]


@VLLM
def test_memory_of_others_is_not_opened(workers_of):
    """The name must have verl's form, the file belong to this user and have the announced size."""
    workers = workers_of(1, "cpu", True)
    name = f"verl_weights_{uuid.uuid4().hex}"
    short = shared_memory.SharedMemory(name=name, create=True, size=64)
    try:
        for about, words in [
            (dict(name="../etc/passwd", size=10), "does not give"),
            (dict(name=f"verl_weights_{'0' * 32}", size=10), "cannot be opened"),
            (dict(name=name, size=1 << 20), "were announced"),
        ]:
            endpoint = f"ipc:///tmp/verl-{uuid.uuid4().hex}.sock"
            call = Beside(
                lambda endpoint=endpoint: workers.engine.request(
                    "POST", "/update_weights_from_ipc", dict(zmq_handles={"0": endpoint})
                )
            )
            socket = Req(endpoint)
            socket.send(pickle.dumps(about))
            socket.recv()
            socket.send(pickle.dumps(dict(bucket_meta={}, is_last=True)))
            socket.recv()
            with pytest.raises(Exception, match=words):
                call.result()
            socket.close()
            pathlib.Path(endpoint[len("ipc://") :]).unlink(missing_ok=True)
    finally:
        short.close()
        short.unlink()
