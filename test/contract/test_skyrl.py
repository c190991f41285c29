"""SkyRL: control calls to every server, updates through /collective_rpc with frozen requests, and handles if colocated.
"""

import json
import math
import threading

import pytest

from conftest import card_count
from engines import Beside, refusal, settled
from peft_replies import FLAGS as LORA_FLAGS
from peft_replies import adapted, check
from tensor_process import Process
from vllm_wire import HERE, WIRES, Sending, Session, on_cards

BROADCAST = pytest.mark.row(12, "SkyRL / NCCL")
HANDLES = pytest.mark.row(13, "SkyRL / CUDA IPC")
LORA = pytest.mark.row(15, "SkyRL / LoRA")


class Client:
    """RemoteInferenceClient's calls to one server: no timeout, no retry, and a body only if Content-Length has one."""

    def __init__(self, engine):
        self.engine, self.session = engine, Session(engine)

    def call(self, path, body=None, method="POST"):
        session = Session(self.engine)
        reply = session.request(method, path, body)
        if int(session.headers.get("content-length", 0)) == 0:
            return None
        assert session.headers["content-type"] == "application/json", session.headers
        assert reply != "", "the reply is read as JSON"
        return reply

    def world_size(self):
        # The client builds the JSON body itself.
        return self.call("/get_world_size", {}, "GET")["world_size"]

    def init(self, info):
        return self.call("/init_weight_transfer_engine", dict(init_info=info))

    def pause(self):
        return self.call("/pause?mode=keep&clear_cache=false")

    def resume(self):
        return self.call("/resume")

    def reset(self):
        return self.call("/reset_prefix_cache", dict(reset_running_requests=True))

    def rpc(self, method, **arguments):
        return self.call("/collective_rpc", dict(method=method, **(dict(kwargs=arguments) if arguments else {})))

    def start(self):
        return self.rpc("skyrl_start_weight_update", is_checkpoint_format=True)

    def nccl(self, lists):
        return self.rpc("update_weights_nccl", update_info={**lists, "packed": True})

    def ipc(self, info):
        return self.rpc("update_weights_ipc", update_info=info)

    def finish(self):
        return self.rpc("skyrl_finish_weight_update")

    def generate(self, count=12, session="s-1", salt=None):
        body = dict(
            sampling_params=dict(max_tokens=count, ignore_eos=True, temperature=0, logprobs=1),
            model=self.engine.get("/v1/models")["data"][0]["id"],
            token_ids=[5, 6, 7],
        )
        if salt is not None:
            body["cache_salt"] = salt
        return Session(self.engine).post("/inference/v1/generate", body, headers={"X-Session-ID": session})["choices"][
            0
        ]


@pytest.fixture
def joined(request):
    made = []

    def make(engine, wire):
        client = Client(engine)
        assert client.world_size() == engine.ranks
        made.append(Sending(engine, wire, client.init))
        return client, made[-1]

    yield make
    for sender in made:
        sender.close()


@BROADCAST
@pytest.mark.brings("group")
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_one_packed_call_for_the_whole_model_with_requests_frozen(engines, joined, ranks, wire):
    if wire == "nccl" and card_count() < 1 + ranks:
        pytest.skip(f"needs {1 + ranks} NVIDIA GPUs")
    engine = engines("qwen3", ranks, on_cards(wire))
    client, sender = joined(engine, wire)
    done = {"results": [None] * ranks}
    for variant in [1, 2]:
        before = client.generate(6)
        frozen = []
        over = threading.Event()
        # Requests keep arriving, and none may be aborted.
        flood = Beside(lambda: until(over, lambda: frozen.append(client.generate(200, salt=str(len(frozen))))))
        settled(lambda: len(frozen), lambda count: count > 0 or flood.done)
        client.pause()
        beside = None
        try:
            assert client.start() == done

            def update(lists):
                nonlocal beside
                # A task of its own that arrives while the update is open.
                beside = Beside(client.reset)
                return client.nccl(lists)

            assert sender.send(update, variant, list(engine.shapes), 1 << 30) == done
            beside.result()
            assert client.finish() == done
            assert not flood.done
        finally:
            client.resume()
        over.set()
        flood.result()
        assert frozen and all(
            choice["finish_reason"] == "length" and len(choice["token_ids"]) == 200 for choice in frozen
        )
        engine.holds(variant)
        after = client.generate(6)
        assert after["token_ids"] != before["token_ids"] or variant == 1
        assert all(entry["logprob"] <= 0 for entry in after["logprobs"]["content"])


def until(over, run):
    while not over.is_set():
        run()


@BROADCAST
@pytest.mark.brings("group")
@pytest.mark.parametrize("wire", WIRES)
def test_memory_is_released_while_the_cache_of_frozen_requests_is_kept(engines, joined, wire):
    engine = engines("qwen3", 1, on_cards(wire))
    client, sender = joined(engine, wire)
    client.pause()
    try:
        client.rpc("skyrl_sleep_for_weight_sync", offload_kv=True)
        with refusal():
            sender.send(client.nccl, 8, list(engine.shapes), 1 << 30)
        client.rpc("skyrl_wake_for_weight_sync", tags=["weights"])
        client.start()
        sender.send(client.nccl, 8, list(engine.shapes), 1 << 30)
        client.finish()
        client.rpc("skyrl_wake_for_weight_sync", tags=["kv_cache"])
    finally:
        client.resume()
    engine.holds(8)
    assert len(client.generate(3)["token_ids"]) == 3


@BROADCAST
@pytest.mark.brings("group")
@pytest.mark.parametrize("wire", WIRES)
def test_an_update_without_a_start_is_refused_and_leaves_the_group_in_step(engines, joined, wire):
    engine = engines("qwen3", 1, on_cards(wire))
    client, sender = joined(engine, wire)
    names = list(engine.shapes)
    with refusal() as found:
        sender.send(client.nccl, 9, names, 1 << 30)
    error = json.loads(found["body"])["error"]["message"]
    assert found["status"] >= 400 and "skyrl_start_weight_update" in error and "stays in step" in error
    client.start()
    sender.send(client.nccl, 9, names, 1 << 30)
    client.finish()
    engine.holds(9)


@BROADCAST
def test_other_methods_are_refused_with_a_list_of_the_known_ones(engines):
    client = Client(engines("qwen3", 1, "cpu"))
    with refusal(400) as found:
        client.rpc("save_sharded_state", path="/tmp/x")
    assert "update_weights_nccl" in json.loads(found["body"])["error"]["message"]
    with refusal(400):
        client.call("/collective_rpc", {})


@BROADCAST
@pytest.mark.brings("group")
@pytest.mark.parametrize("sizes", [True, False])
def test_the_calls_of_the_first_remote_engine(engines, sizes):
    """/init_weight_update_communicator and one request for each chunk, over one of torch's groups."""
    engine = engines("qwen3", 1, "cpu")
    client = Client(engine)
    names = list(engine.shapes)

    def init(info):
        info.pop("backend")
        body = dict(
            master_addr=info.pop("master_address"),
            **info,
            group_name="weight_transfer",
            backend="gloo",
            model_dtype_str="torch.bfloat16",
            override_existing_receiver=True,
        )
        return client.call("/init_weight_update_communicator", body)

    sender = Sending(engine, "gloo", init)
    try:
        assert sender.initialised == {"status": "ok"}
        client.pause()
        for at in range(0, len(names), 5):
            part = names[at : at + 5]

            def update(lists):
                body = dict(
                    names=lists["names"],
                    dtypes=["torch.bfloat16"] * len(lists["names"]),
                    shapes=lists["shapes"],
                    sizes=None,
                )
                if sizes:
                    body["sizes"] = [math.prod(shape) for shape in lists["shapes"]]
                return client.call("/update_weights", body)

            assert sender.send(update, 11, part, 1 << 40 if sizes else None)["status"] == "ok"
        client.reset()
        client.resume()
        engine.holds(11)
    finally:
        sender.close()


@HANDLES
@pytest.mark.cards(1)
@pytest.mark.brings("memory")
@pytest.mark.parametrize("chunk", [1, 4, 1000])
def test_chunks_of_handles_while_colocated(engines, chunk):
    engine = engines("qwen3", 1, "cuda")
    client = Client(engine)
    process = Process(None, str(HERE / "vllm_sender.py"))
    try:
        process("start", device="cuda:0", shapes=[[name, list(shape)] for name, shape in engine.shapes.items()])
        names = list(engine.shapes)
        client.init({})
        for variant in [1, 2, 1]:
            client.call("/sleep?level=2")
            client.call("/wake_up?tags=weights")
            client.start()
            for at in range(0, len(names), chunk):
                part = names[at : at + chunk]
                entry, sizes = process("chunk", variant=variant, names=part)
                info = dict(
                    names=part,
                    dtype_names=["bfloat16"] * len(part),
                    shapes=[list(engine.shapes[name]) for name in part],
                    sizes=sizes,
                    ipc_handles_pickled=entry,
                )
                assert client.ipc(info) == {"results": [None]}
                # The server synchronises the device before the reply, so the sender may reuse its memory.
                left = process("left")
                assert set(left) <= {"0", "gone"}, f"after a chunk: {left}"
                process("forget")
            client.finish()
            client.call("/wake_up?tags=kv_cache")
            engine.holds(variant)
            assert len(client.generate(3)["token_ids"]) == 3
        entry, sizes = process("chunk", variant=3, names=names[:2])
        with refusal() as found:
            client.ipc(
                dict(
                    names=names[:2],
                    dtype_names=["bfloat16"] * 2,
                    shapes=[list(engine.shapes[name]) for name in names[:2]],
                    sizes=sizes,
                    ipc_handles_pickled=entry,
                )
            )
        assert "skyrl_start_weight_update" in found["body"]
        assert set(process("left")) <= {"0", "gone"}, "what is refused is given back too"
    finally:
        process.kill()


@HANDLES
def test_handles_for_an_engine_without_gpus_are_refused_with_the_reason(engines):
    client = Client(engines("qwen3", 1, "cpu"))
    client.init({})
    client.start()
    with refusal(400) as found:
        client.ipc(
            dict(
                names=["a"],
                dtype_names=["bfloat16"],
                shapes=[[1]],
                sizes=[1],
                ipc_handles_pickled="gASVAAAAAAAAAAB9lC4=",
            )
        )
    assert "computes on the CPU" in json.loads(found["body"])["error"]["message"]


@LORA
@pytest.mark.brings("files")
def test_the_adapter_is_saved_to_the_same_folder_and_replaced_in_place(engines, shared_root):
    """One name and one folder for all steps; nothing is paused (RemoteInferenceClient.load_lora_adapter)."""
    engine = engines("qwen3", 1, "cpu", *LORA_FLAGS, "--model-root", shared_root)
    client = Client(engine)
    folder = shared_root / "lora_sync_path"
    versions = []
    for seed in (1, 2):
        model = adapted("qwen3", seed)
        model.save_pretrained(folder)
        reply = client.call("/skyrl/v1/load_lora_adapter", dict(lora_name="skyrl-lora", lora_path=str(folder)))
        assert reply["status"] == "ok" and reply["lora_name"] == "skyrl-lora"
        versions.append(reply["lora_int_id"])
        check(engine, "skyrl-lora", model)
        made = client.call(
            "/inference/v1/generate",
            dict(model="skyrl-lora", token_ids=[5, 6], sampling_params=dict(max_tokens=1), request_id=f"r{seed}"),
        )
        assert made["model"] == "skyrl-lora"
    assert versions[1] > versions[0]
    engine.post("/v1/unload_lora_adapter", dict(lora_name="skyrl-lora"))
    with refusal(404):
        client.call("/inference/v1/generate", dict(model="skyrl-lora", token_ids=[5]))
    with refusal(400):
        client.call("/skyrl/v1/load_lora_adapter", dict(lora_name="skyrl-lora"))
