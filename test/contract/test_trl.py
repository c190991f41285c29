"""TRL's `vllm-serve` client: it joins the engine's communicator and sends each parameter after the reply for it."""

import json
import pathlib
import socket
import time

import pytest

from distributed_group import free_port
from engines import refusal
from tensor_process import Process

ROW = pytest.mark.row(31, "TRL / `trl vllm-serve`")
WAYS = ["gloo", pytest.param("nccl", marks=pytest.mark.cards(2))]
GROUP_TIMEOUT_S = 60


def client():
    return Process(
        {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}, pathlib.Path(__file__).parent / "broadcaster.py"
    )


@pytest.fixture
def trainer():
    process = client()
    yield process
    process.kill()


def served(engines, backend="gloo", ranks=1):
    """The client uses GPU 0."""
    device = "cuda" if backend == "nccl" else "cpu"
    env = {"CUDA_VISIBLE_DEVICES": ",".join(str(card) for card in range(1, 1 + ranks))} if backend == "nccl" else None
    return engines("qwen3", ranks, device, "--group-timeout", GROUP_TIMEOUT_S, env=env)


def join(engine, trainer, backend="gloo", port=None):
    port = free_port() if port is None else port
    world = engine.get("/get_world_size/")["world_size"] + 1
    reply = engine.post(
        "/init_communicator/",
        dict(host="0.0.0.0", port=port, world_size=world, client_device_uuid="42", backend=backend),
    )
    assert reply == {"message": "Request received, initializing communicator"}
    time.sleep(0.1)
    trainer("join", backend=backend, name="trl", address="127.0.0.1", port=port, rank=world - 1, world=world)
    return port


def ask(engine, name, shape, dtype="bfloat16"):
    return engine.post("/update_named_param/", dict(name=name, dtype=f"torch.{dtype}", shape=list(shape)), timeout=180)


def push(engine, trainer, variant, names=None, dtype="bfloat16", barrier="new"):
    """update_model_params: for each parameter the request, its reply, the broadcast and the barrier."""
    for name in names or engine.shapes:
        shape = list(engine.shapes[name])
        assert ask(engine, name, shape, dtype) == {"message": "Request received, updating named parameter"}
        trainer("parameter", variant=variant, name=name, shape=shape, dtype=dtype, barrier=barrier)


@ROW
@pytest.mark.brings("group")
@pytest.mark.parametrize("backend", WAYS)
@pytest.mark.parametrize("barrier", ["new", "old"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_go_to_a_to_b_and_back_to_a(engines, trainer, backend, barrier, ranks):
    if backend == "nccl" and ranks == 2:
        pytest.skip("two cards: the client's and one more")
    engine = served(engines, backend, ranks)
    assert engine.get("/health/")["status"]
    join(engine, trainer, backend)
    engine.spoil()
    for variant in [1, 2, 1]:
        push(engine, trainer, variant, barrier=barrier)
        assert engine.post("/reset_prefix_cache/") == {
            "message": "Request received, resetting prefix cache status: True"
        }
        engine.holds(variant)
        assert engine.metric("refit:weights_torn") == 0
    assert trainer("keys") < 10, "what barriers leave in the store is taken away"
    assert engine.post("/close_communicator/") == {"message": "Request received, closing communicator"}
    trainer("leave")
    assert engine.get("/server_info")["weight_groups"] == []


@ROW
@pytest.mark.brings("group")
def test_a_parameter_is_in_place_when_the_barrier_is_passed(engines, trainer):
    """The next generation, also on another connection, uses the new weights."""
    engine = served(engines)
    join(engine, trainer)
    for variant in [3, 4]:
        for name in engine.shapes:
            push(engine, trainer, variant, [name])
            engine.holds(variant, [name])
    push(engine, trainer, 5, dtype="float32")
    engine.holds(5)
    engine.post("/close_communicator/")


@ROW
def test_a_wrong_request_is_refused_before_the_client_sends(engines, trainer):
    engine = served(engines)
    join(engine, trainer)
    push(engine, trainer, 1)
    name, shape = next(iter(engine.shapes.items()))
    for wrong in [
        dict(name="nobody"),
        dict(shape=[3, *shape[1:]]),
        dict(dtype="torch.int64"),
        dict(dtype="torch.nothing"),
        dict(shape=[-1]),
    ]:
        with refusal(400) as found:
            engine.post("/update_named_param/", dict(name=name, dtype="torch.bfloat16", shape=list(shape)) | wrong)
        assert str(next(iter(wrong.values()))).removeprefix("torch.").strip("[]").split(",")[0] in found["body"], found
    # The client has not broadcast, and the server does not wait.
    push(engine, trainer, 2)
    engine.holds(2)
    engine.post("/close_communicator/")


@ROW
def test_a_request_whose_reply_was_lost_may_be_repeated(engines, trainer):
    """The Retry of `requests` posts again."""
    engine = served(engines)
    join(engine, trainer)
    name = next(iter(engine.shapes))
    shape = list(engine.shapes[name])
    for _ in range(3):
        ask(engine, name, shape)
    trainer("parameter", variant=6, name=name, shape=shape, dtype="bfloat16", barrier="new")
    engine.holds(6, [name])
    # The same parameter once more is a new update.
    push(engine, trainer, 7, [name])
    engine.holds(7, [name])
    engine.post("/close_communicator/")


@ROW
def test_a_failure_after_the_reply_is_reported_at_the_next_call_and_a_new_client_works(engines, trainer):
    engine = served(engines)
    port = join(engine, trainer)
    push(engine, trainer, 1)
    names = list(engine.shapes)
    ask(engine, names[0], engine.shapes[names[0]])
    trainer.kill()
    with refusal(409) as found:
        ask(engine, names[1], engine.shapes[names[1]])
    assert names[0] in found["body"] and "after the reply" in found["body"], found
    with refusal() as dead:
        ask(engine, names[1], engine.shapes[names[1]])
    assert 400 <= dead["status"] < 600
    engine.holds(1)
    fresh = client()
    try:
        join(engine, fresh, port=port)
        push(engine, fresh, 2)
        assert engine.post("/reset_prefix_cache/")["message"].endswith("True")
        engine.holds(2)
        engine.post("/close_communicator/")
    finally:
        fresh.kill()


@ROW
def test_a_client_that_died_is_replaced(engines, trainer):
    """The old client did not close, and the server still waits for one of its parameters."""
    engine = served(engines)
    port = join(engine, trainer)
    name = next(iter(engine.shapes))
    ask(engine, name, engine.shapes[name])
    trainer.kill()
    fresh = client()
    try:
        join(engine, fresh, port=port)
        push(engine, fresh, 3)
        engine.holds(3)
        engine.post("/close_communicator/")
    finally:
        fresh.kill()


@ROW
def test_impossible_requests_are_refused_at_once(engines):
    engine = served(engines)
    for path, body in [("/update_named_param/", dict(name="x", dtype="torch.bfloat16", shape=[1]))]:
        with refusal(409) as found:
            engine.post(path, body)
        assert "/init_communicator/" in found["body"]
    with refusal(400) as nccl:
        engine.post(
            "/init_communicator/", dict(host="0.0.0.0", port=free_port(), world_size=2, client_device_uuid="42")
        )
    assert "NCCL needs GPUs" in nccl["body"]
    with refusal(400) as world:
        engine.post(
            "/init_communicator/",
            dict(host="0.0.0.0", port=free_port(), world_size=5, client_device_uuid="42", backend="gloo"),
        )
    assert "world_size" in json.loads(world["body"])["error"]["message"]
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        with refusal(409) as busy:
            engine.post(
                "/init_communicator/",
                dict(
                    host="0.0.0.0", port=taken.getsockname()[1], world_size=2, client_device_uuid="42", backend="gloo"
                ),
            )
            # On a busy machine the reply may come before the error is known. Then the next call reports it.
            ask(engine, *next(iter(engine.shapes.items())))
    assert "listen" in busy["body"]
    # The path works without a slash, too.
    assert engine.post("/close_communicator")["message"]


@ROW
@pytest.mark.cards(1)
def test_the_client_must_use_another_gpu(engines, trainer):
    engine = engines("qwen3", 1, "cuda")
    with refusal(400) as found:
        engine.post(
            "/init_communicator/",
            dict(host="0.0.0.0", port=free_port(), world_size=2, client_device_uuid=trainer("uuid")),
        )
    assert "one GPU" in found["body"]
