"""NeMo-RL: colocated over SGLang's routes, and over the admin routes of Dynamo's workers."""

import pathlib

import pytest
import torch

import tensor_payloads as payloads
from distributed_group import free_port
from engines import Beside, refusal, settled
from tensor_process import Process
from tensors import bucket, coded, serialize

SGLANG = pytest.mark.row(25, "NeMo-RL / SGLang")
DYNAMO = pytest.mark.row(26, "NeMo-RL / Dynamo")
WAYS = ["gloo", pytest.param("nccl", marks=pytest.mark.cards(2))]
TRAIN_WORLD = 2


def flushed(engine):
    """Repeats GET /flush_cache until it returns 200."""
    assert settled(lambda: "flushed" in engine.get("/flush_cache").lower(), bool, 60)


def refit(engine, pairs, version):
    """stream_weights_via_http: resume weights, one request for each bucket and dtype whose `success` is read, flush,
    resume the other memory.
    """
    engine.post("/resume_memory_occupation", dict(tags=["weights"]))
    for entries in pairs:
        reply = engine.post(
            "/update_weights_from_tensor",
            dict(
                serialized_named_tensors=entries,
                load_format="flattened_bucket",
                flush_cache=False,
                weight_version=str(version),
            ),
        )
        assert reply["success"] is True, reply.get("error_message") or reply.get("message")
    flushed(engine)
    engine.post(
        "/resume_memory_occupation", dict(tags=["kv_cache", "cuda_graph"] if engine.device == "cuda" else ["kv_cache"])
    )


def release(engine):
    engine.get("/flush_cache")
    engine.post(
        "/release_memory_occupation",
        dict(tags=["weights", "kv_cache", "cuda_graph"] if engine.device == "cuda" else ["weights", "kv_cache"]),
    )


@SGLANG
@pytest.mark.brings("memory")
@pytest.mark.parametrize("ranks", [1, 2])
def test_sglang_weights_come_back_by_buckets_after_each_release(engines, ranks):
    """A bucket for each dtype, one entry for each tensor-parallel rank, and no pause."""
    engine = engines("qwen3", ranks)
    assert engine.get("/health_generate") is not None
    flushed(engine)
    names = list(engine.shapes)
    for version, variant in enumerate([1, 2]):
        release(engine)
        pairs, kept = [], []
        for at in range(0, len(names), 5):
            for dtype in [torch.bfloat16, torch.float32]:
                chosen = [
                    name
                    for index, name in enumerate(names[at : at + 5])
                    if (index % 2 == 0) == (dtype == torch.bfloat16)
                ]
                if not chosen:
                    continue
                flat = bucket([(name, coded(variant, name, engine.shapes[name]).to(dtype)) for name in chosen])
                kept.append(flat)
                pairs.append([serialize(flat) for _ in range(ranks)])
        refit(engine, pairs, version)
        engine.holds(variant)
        assert engine.version() == str(version)
        assert engine.tokens()["meta_info"]["completion_tokens"] == 4


@SGLANG
@pytest.mark.cards(1)
@pytest.mark.brings("memory")
def test_sglang_a_gpu_is_named_by_its_uuid(engines):
    engine = engines("qwen3", 1, "cuda")
    release(engine)
    named = [(name, payloads.coded(3, name, shape, "cuda:0")) for name, shape in engine.shapes.items()]
    flat = payloads.flatten(named, "cuda:0")
    torch.cuda.synchronize()
    refit(engine, [[payloads.serialize(flat, by_uuid=True)]], 7)
    engine.holds(3)


@SGLANG
def test_sglang_a_refusal_says_success_false_and_why(engines):
    engine = engines("qwen3")
    before = engine.checksums()
    flat = bucket([("nobody", torch.zeros(3, dtype=torch.bfloat16))])
    with refusal(400) as found:
        engine.post(
            "/update_weights_from_tensor",
            dict(
                serialized_named_tensors=[serialize(flat)],
                load_format="flattened_bucket",
                flush_cache=False,
                weight_version="9",
            ),
        )
    assert '"success":false' in found["body"] and "nobody" in found["body"]
    assert engine.checksums() == before
    for action in ["snapshot", "compare"]:
        assert engine.post("/weights_checker", dict(action=action))["success"] is True


class Dynamo:
    """The refit channel of one worker: a reply without status "ok" is an error."""

    def __init__(self, engine, backend):
        self.engine, self.backend = engine, backend
        script = pathlib.Path(__file__).parent / "broadcaster.py"
        self.trainers = [
            Process({"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}, script)
            for _ in range(TRAIN_WORLD if backend == "gloo" else 1)
        ]

    def post(self, route, body):
        reply = self.engine.post(f"/engine/{route}", body)
        assert reply["status"] == "ok", reply
        return reply

    def join(self):
        """The group has all training ranks first, then the engine's."""
        port, front = free_port(), len(self.trainers)
        info = dict(
            master_address="127.0.0.1", master_port=port, rank_offset=front, world_size=front + self.engine.ranks
        )
        own = dict(backend="gloo", group_name="dynamo") if self.backend == "gloo" else {}
        asked = Beside(
            lambda: self.post(
                "init_weights_update_group", dict(engine_rpc="init_weight_transfer_engine", init_info=info | own)
            )
        )
        for rank, process in enumerate(self.trainers):
            process.begin(
                "join",
                backend=self.backend,
                name="dynamo",
                address="127.0.0.1",
                port=port,
                rank=rank,
                world=front + self.engine.ranks,
            )
        for process in self.trainers:
            process.end()
        asked.result()

    def update(self, variant, names=None):
        names = list(self.engine.shapes) if names is None else names
        info = dict(
            names=names,
            dtype_names=["bfloat16"] * len(names),
            shapes=[list(self.engine.shapes[name]) for name in names],
            packed=True,
        )
        common = dict(allow_unpaused=True, reset_prefix_cache=False)
        self.post(
            "update_weights_from_distributed",
            dict(engine_rpc="start_weight_update", is_checkpoint_format=True) | common,
        )
        asked = Beside(
            lambda: self.post(
                "update_weights_from_distributed", dict(engine_rpc="update_weights", update_info=info) | common
            )
        )
        for root, process in enumerate(self.trainers):
            process.begin(
                "packed",
                variant=variant,
                tensors=[(name, list(self.engine.shapes[name])) for name in names],
                receives=root > 0,
            )
        for process in self.trainers:
            process.end()
        asked.result()
        self.post("update_weights_from_distributed", dict(engine_rpc="finish_weight_update") | common)

    def flush(self):
        self.post("pause_generation", dict(mode="wait", clear_cache=True))
        self.post("resume_generation", {})

    def close(self):
        for process in self.trainers:
            process.kill()


@pytest.fixture
def dynamo(engines, request):
    backend = request.param
    env = {"CUDA_VISIBLE_DEVICES": "1"} if backend == "nccl" else None
    made = Dynamo(engines("qwen3", 1, "cuda" if backend == "nccl" else "cpu", "--group-timeout", 60, env=env), backend)
    yield made
    made.close()


@DYNAMO
@pytest.mark.brings("group")
@pytest.mark.parametrize("dynamo", WAYS, indirect=True)
def test_dynamo_weights_go_to_a_to_b_and_back_to_a(dynamo):
    dynamo.join()
    dynamo.engine.spoil()
    for variant in [1, 2, 1]:
        dynamo.update(variant)
        dynamo.flush()
        dynamo.engine.holds(variant)
        assert dynamo.engine.metric("refit:weights_torn") == 0


@DYNAMO
@pytest.mark.parametrize("dynamo", ["gloo"], indirect=True)
def test_dynamo_a_pause_waits_for_running_requests_and_errors_are_no_200(dynamo):
    engine = dynamo.engine
    running = [Beside(lambda: engine.tokens(300)) for _ in range(4)]
    # All of them run: a request after the pause waits for its end.
    settled(
        lambda: engine.metric("refit:num_requests_running") + sum(one.done for one in running),
        lambda count: count == len(running),
    )
    dynamo.post("pause_generation", dict(mode="wait", clear_cache=True))
    assert all(one.result()["meta_info"]["completion_tokens"] == 300 for one in running)
    waiting = Beside(lambda: engine.tokens(2))
    settled(lambda: engine.metric("refit:num_requests_waiting"), lambda count: count > 0)
    assert not waiting.done
    dynamo.post("resume_generation", {})
    assert waiting.result()["meta_info"]["completion_tokens"] == 2
    for route, body in [
        (
            "init_weights_update_group",
            dict(engine_rpc="init_weight_transfer_engine", init_info=dict(master_address="127.0.0.1")),
        ),
        ("init_weights_update_group", dict(engine_rpc="shutdown", init_info={})),
        ("update_weights_from_distributed", dict(engine_rpc="shutdown")),
        ("update_weights_from_distributed", dict(engine_rpc="update_weights")),
        ("pause_generation", dict(mode="never")),
    ]:
        with refusal() as found:
            dynamo.post(route, body)
        assert 400 <= found["status"] < 500, found
