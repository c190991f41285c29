"""verl with vLLM: whole weights (verl_workers.py)."""

import gc
import os
import pathlib
import pickle
import uuid
from multiprocessing import shared_memory

import pytest

from engines import Beside, refusal
from tensor_process import shared_files
from verl_workers import BUCKET, WAYS, actor_of, error_of, get, shm_left, workers_of  # noqa: F401
from zmq_req import Req

VLLM = pytest.mark.row(11, "verl / vLLM")


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
