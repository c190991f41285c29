"""vLLM's native weight transfer: init, then start, updates beside the data plane, finish. Both forms of `packed`."""

import base64
import pickle
import time

import pytest

from conftest import card_count
from engines import GOLDENS, Beside, refusal
from tensor_process import Process
from vllm_wire import HERE, WIRES, Sending, Session, on_cards

pytestmark = pytest.mark.row(30, "vLLM's own client / NCCL, CUDA IPC, disk")
MIB = 1 << 20


class Client:
    """The four calls of vLLM's HTTP client (weight_transfer/clients.py): JSON, 300 s each, no retry."""

    def __init__(self, engine):
        self.session = Session(engine)

    def init(self, info):
        return self.session.post("/init_weight_transfer_engine", dict(init_info=info))

    def start(self):
        return self.session.post("/start_weight_update")

    def update(self, info):
        return self.session.post("/update_weights", dict(update_info=info))

    def finish(self, version=None):
        return self.session.post("/finish_weight_update", None if version is None else dict(weight_version=version))


@pytest.fixture
def sending(request):
    made = []

    def make(engine, wire, **info):
        client = Client(engine)
        made.append(Sending(engine, wire, client.init, **info))
        assert made[-1].initialised == {"message": "Weight transfer initialized"}
        return client, made[-1]

    yield make
    for sender in made:
        sender.close()


@pytest.mark.brings("group")
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("generation", ["unpacked", "packed in update_info", "packed in init_info"])
def test_weights_go_to_a_to_b_and_back_to_a(engines, sending, generation, ranks, wire):
    if wire == "nccl" and card_count() < 1 + ranks:
        pytest.skip(f"needs {1 + ranks} NVIDIA GPUs")
    engine = engines("qwen3", ranks, on_cards(wire))
    engine.spoil()
    limit = 30_000
    fields = dict(packed=True, packed_buffer_size_bytes=limit, packed_num_buffers=2)
    client, sender = sending(engine, wire, **(fields if generation == "packed in init_info" else {}))
    names = list(engine.shapes)
    for variant in [1, 2, 1]:
        assert client.start() == {"message": "Weight update started"}
        for part in [names[:5], names[5:]]:
            info = {} if generation != "packed in update_info" else fields
            reply = sender.send(
                lambda lists, info=info: client.update({**lists, **info}),
                variant,
                part,
                None if generation == "unpacked" else limit,
            )
            assert reply["message"] == "Weights updated" and reply["report"]["tensors"] == len(part)
            if generation != "unpacked":
                assert any(size > limit for size in sender.sizes), "chunks exceed the buffer that they are cut by"
        assert client.finish(f"step-{variant}") == {"message": "Weight update finished"}
        engine.holds(variant)
        assert client.session.request("GET", "/weight_info")["weight_version"] == f"step-{variant}"


@pytest.mark.brings("group")
@pytest.mark.parametrize("wire", WIRES)
def test_the_reference_order_pause_start_update_finish_resume(engines, sending, wire):
    """examples/rl/rlhf_http_nccl.py: world size, init in a thread, generate, pause, one update, resume, generate."""
    engine = engines("qwen3", 1, on_cards(wire))
    session = Session(engine)
    assert session.request("GET", "/get_world_size")["world_size"] == 1
    client, sender = sending(engine, wire)
    assert session.post("/pause?mode=keep")["status"] == "paused"
    running = Beside(
        lambda: Session(engine).post(
            "/inference/v1/generate",
            dict(token_ids=[5, 6, 7], sampling_params=dict(max_tokens=8, ignore_eos=True, temperature=0)),
        )
    )
    client.start()
    sender.send(lambda lists: client.update({**lists, "packed": True}), 3, list(engine.shapes), 1 << 30)
    assert session.request("GET", "/is_paused") == {"is_paused": True}, "answers while and after it"
    client.finish("3")
    assert not running.done
    assert session.post("/resume") == {"status": "resumed"}
    assert len(running.result()["choices"][0]["token_ids"]) == 8
    engine.holds(3)


@pytest.mark.brings("group")
@pytest.mark.parametrize("wire", WIRES)
def test_a_refused_update_is_received_and_the_group_stays_in_step(engines, sending, wire):
    engine = engines("qwen3", 1, on_cards(wire))
    client, sender = sending(engine, wire)
    names = list(engine.shapes)
    sender.send(lambda lists: client.update({**lists, "packed": True}), 4, names, 1 << 30)
    for wrong in [dict(names=["nobody", *names[1:]]), dict(weight_version=7)]:
        with refusal(400) as found:
            sender.send(
                lambda lists, wrong=wrong: client.update(
                    {**lists, "packed": True, "packed_buffer_size_bytes": 9000, **wrong}
                ),
                5,
                names,
                9000,
            )
        assert "the group stays in step" in found["body"]
    with refusal(400) as found:
        # Bytes before two-byte weights put these at odd addresses. Tensors that no engine has are dropped with the
        # rest.
        sender.send(lambda lists: client.update({**lists, "packed": True}), 5, names, 1 << 30, {names[0]: "uint8"})
    engine.holds(4)
    sender.send(lambda lists: client.update(lists), 5, names)
    engine.holds(5)


@pytest.mark.brings("group")
@pytest.mark.parametrize("wire", WIRES)
def test_a_failed_update_stays_pending_and_the_session_can_be_repaired_or_restarted(engines, sending, wire):
    engine = engines("qwen3", 1, on_cards(wire))
    client, sender = sending(engine, wire)
    names = list(engine.shapes)
    client.start()
    with refusal(400):
        sender.send(lambda lists: client.update({**lists, "names": ["nobody", *names[1:3]]}), 6, names[:3])
    with refusal(409) as found:
        client.finish()
    assert "TRANSACTION_INCOMPLETE" in found["body"]
    client.start()
    sender.send(lambda lists: client.update({**lists, "packed": True}), 6, names, 1 << 30)
    client.finish("6")
    engine.holds(6)
    assert engine.version() == "6"


def test_init_stays_open_until_all_ranks_have_joined_and_other_requests_work(engines):
    engine = engines("qwen3", 1, "cpu", "--group-timeout", 3, which="impatient")
    client = Client(engine)
    began = time.monotonic()
    with refusal(504) as found:
        client.init(dict(master_address="127.0.0.1", master_port=1, rank_offset=1, world_size=2, backend="gloo"))
    assert time.monotonic() - began > 2 and "GROUP_TIMEOUT" in found["body"]
    with refusal(409):
        client.update(dict(names=[], dtype_names=[], shapes=[]))
    with refusal(400) as found:
        client.init(dict(master_address="127.0.0.1", master_port=1, rank_offset=1, world_size=2))
    assert "CPU" in found["body"]


@pytest.mark.brings("files")
def test_a_checkpoint_on_disk(engines):
    engine = engines("qwen3", 1, "cpu")
    client = Client(engine)
    client.init({})
    for version in ["one", "two"]:
        client.start()
        assert client.update(dict(path=str(GOLDENS / engine.kind)))["report"]["source"] == "disk"
        client.finish(version)
        assert engine.version() == version


@pytest.mark.refused("sparse_nccl, sharded_rdt, draft models (400)")
def test_unsupported_transfers_are_refused_with_the_reason(engines):
    client = Client(engines("qwen3", 1, "cpu"))
    lists = dict(names=["a"], dtype_names=["bfloat16"], shapes=[[1]])
    client.init({})
    with refusal(400) as found:
        client.update({**lists, "ipc_handles_pickled": base64.b64encode(pickle.dumps([])).decode()})
    assert "computes on the CPU" in found["body"]
    for call, says in [
        (lambda: client.init(dict(trainer_actor_names=["t"])), "sharded_rdt"),
        (lambda: client.update({**lists, "num_updates_list": [1]}), "sparse_nccl"),
        (lambda: client.update({**lists, "ipc_handles": [{}]}), "ipc_handles_pickled"),
        (lambda: client.session.post("/start_draft_weight_update"), "draft"),
        (lambda: client.session.post("/update_weights", {}), "update_info"),
        (lambda: client.session.post("/init_weight_transfer_engine", {}), "init_info"),
    ]:
        with refusal(400) as found:
            call()
        assert says in found["body"]


@pytest.fixture
def handles(engines):
    engine = engines("qwen3", 1, "cuda")
    process = Process(None, str(HERE / "vllm_sender.py"))
    process("start", device="cuda:0", shapes=[[name, list(shape)] for name, shape in engine.shapes.items()])
    yield engine, process
    process.kill()


def lists_of(engine, names):
    return dict(
        names=names, dtype_names=["bfloat16"] * len(names), shapes=[list(engine.shapes[name]) for name in names]
    )


@pytest.mark.cards(1)
@pytest.mark.brings("memory")
@pytest.mark.parametrize("bare", [False, True])
def test_handles_of_every_tensor(handles, bare):
    engine, process = handles
    client, names = Client(engine), list(engine.shapes)
    client.init({})
    engine.spoil()
    for variant in [1, 2, 1]:
        client.start()
        for part in [names[:4], names[4:]]:
            client.update(
                {
                    **lists_of(engine, part),
                    "ipc_handles_pickled": process("each", variant=variant, names=part, bare=bare),
                }
            )
        client.finish(str(variant))
        engine.holds(variant)
    left = process("left")
    assert set(left) <= {"0", "gone"}, f"every reference is given back once: {left}"
    assert process("forget") < MIB


@pytest.mark.cards(1)
@pytest.mark.brings("memory")
def test_chunks_in_a_buffer_that_is_exported_once(handles):
    engine, process = handles
    client, names = Client(engine), list(engine.shapes)
    client.init(dict(packed=True))
    for variant in [1, 2]:
        client.start()
        for at in range(0, len(names), 4):
            part = names[at : at + 4]
            entry, sizes = process("into_buffer", variant=variant, names=part, size=4 * MIB)
            client.update({**lists_of(engine, part), "ipc_handles_pickled": entry, "tensor_sizes": sizes})
            assert process("left") == {"1": 1}, "held from the first chunk on"
        client.finish(str(variant))
        engine.holds(variant)
        left = process("left")
        assert sum(left.values()) == 1 and set(left) <= {"0", "gone"}, f"given back once, at the end: {left}"
        process("forget")
        process.kill()
        process.__init__(None, str(HERE / "vllm_sender.py"))
        process("start", device="cuda:0", shapes=[[name, list(shape)] for name, shape in engine.shapes.items()])
