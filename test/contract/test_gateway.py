"""Trainers through a gateway: two engines behind one address accept the requests for one, bit for bit."""

import json
import signal

import pytest

import test_areal
import test_prime_rl
import test_slime
from distributed_group import free_port
from engines import GOLDENS, Beside, Engine, settled  # noqa: F401
from fleet import Fleet, fleets  # noqa: F401
from tensor_process import Process
from vllm_wire import GROUP, HERE, Session


class Roots:
    """Like tmp_path_factory, within the folder of the fleet's checkpoints."""

    def __init__(self, folder):
        self.folder = folder

    def mktemp(self, name):
        (self.folder / name).mkdir(parents=True)
        return self.folder / name


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    return Roots(tmp_path_factory.mktemp("fleet"))


@pytest.fixture(scope="module")
def fleet(fleets, roots):
    return fleets("qwen3", 1, "cpu", "--model-root", roots.folder)


@pytest.fixture
def only(fleet):
    """The fleet for tests that request an engine of their own, whichever they request."""
    return lambda *_, **__: fleet


PROMPT = dict(input_ids=[5, 6, 7], sampling_params=dict(max_new_tokens=24, temperature=0, ignore_eos=True))


class Joined:
    """A trainer with vLLM's client that has joined the ranks of both engines by one call to the gateway."""

    def __init__(self, fleet, **info):
        self.fleet, self.session = fleet, Session(fleet)
        self.process = Process({"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}, str(HERE / "vllm_sender.py"))
        self.process("start", device="cpu", shapes=[[name, list(shape)] for name, shape in fleet.shapes.items()])
        port, world = free_port(), 1 + self.session.request("GET", "/get_world_size")["world_size"]
        fields = dict(
            master_address="127.0.0.1", master_port=port, rank_offset=1, world_size=world, backend="gloo", **info
        )
        asked = Beside(lambda: self.session.post("/init_weight_transfer_engine", dict(init_info=fields)))
        self.process("join", backend="gloo", name=GROUP, address="127.0.0.1", port=port, world=world)
        assert asked.result()["message"] == "Weight transfer initialized"

    def update(self, variant, names):
        lists = dict(
            names=names, dtype_names=["bfloat16"] * len(names), shapes=[list(self.fleet.shapes[name]) for name in names]
        )
        asked = Beside(lambda: self.session.post("/update_weights", dict(update_info=lists)))
        self.process.begin("send", variant=variant, names=names, limit=None, dtypes=None)
        self.process.end()
        reply = asked.result()
        assert reply["message"] == "Weights updated" and len(reply["engines"]) == len(self.fleet.engines)

    def whole(self, variant, version):
        names = list(self.fleet.shapes)
        assert self.session.post("/start_weight_update")["message"] == "Weight update started"
        for part in [names[:5], names[5:]]:
            self.update(variant, part)
        assert (
            self.session.post("/finish_weight_update", dict(weight_version=version))["message"]
            == "Weight update finished"
        )


@pytest.mark.parametrize("ranks", [1, 2])
def test_vllm_weights_are_broadcast_to_the_ranks_of_all_engines(fleets, fleet, ranks):
    if ranks > 1:
        fleet = fleets("qwen3", ranks)
    fleet.spoil()
    trainer = Joined(fleet)
    try:
        for variant in [1, 2, 1]:
            trainer.whole(variant, f"step-{variant}")
            fleet.holds(variant)
            assert trainer.session.request("GET", "/weight_info")["weight_version"] == f"step-{variant}"
        settled(
            lambda: [worker["state"] for worker in fleet.get("/workers")["workers"]],
            lambda states: states == ["ready"] * 2,
        )
        assert fleet.post("/generate", PROMPT)["meta_info"]["weight_version"] == "step-1"
    finally:
        trainer.process.kill()


def test_vllm_checkpoints_are_loaded_by_all_engines(fleet, roots):
    root = roots.mktemp("vllm")
    session = Session(fleet)
    for variant in [1, 2]:
        folder = test_areal.checkpoint(root / f"step-{variant}", fleet, variant)
        assert (
            session.post("/init_weight_transfer_engine", dict(init_info={}))["message"] == "Weight transfer initialized"
        )
        session.post("/pause?mode=keep")
        session.post("/start_weight_update")
        assert session.post("/update_weights", dict(update_info=dict(path=str(folder))))["message"] == "Weights updated"
        session.post("/finish_weight_update", dict(weight_version=f"step-{variant}"))
        session.post("/resume")
        fleet.holds(variant)
        assert session.request("GET", "/weight_info")["weight_version"] == f"step-{variant}"


@pytest.mark.parametrize("mode", ["sglang", "vllm"])
def test_areal_checkpoints(only, roots, mode):
    test_areal.test_a_checkpoint_that_is_requested_again_is_loaded_again(only, Roots(roots.folder / mode), mode)


def test_prime_rl_filesystem(only, roots):
    test_prime_rl.test_a_checkpoint_is_loaded_from_its_folder(only, roots)


def test_slime_checkpoints(only, roots):
    test_slime.test_a_checkpoint_for_every_version(only, 1, roots)


def test_an_engine_killed_under_load_loses_no_request_and_returns_with_the_trainers_weights(tmp_path):
    """SIGKILL during requests and updates.

    A new process at the same address loads the weights from the other engine, bit for bit, before it gets requests.
    """
    with Fleet("qwen3", 1, "cpu") as fleet:
        trainer = Joined(fleet)
        trainer.whole(1, "step-1")
        stays, dies = fleet.engines
        over, versions = [], []

        def ask(client):
            while not over:
                reply = fleet.request("POST", "/generate", PROMPT)
                versions.append(reply["meta_info"]["weight_version"])
                assert len(reply["output_ids"]) == 24

        clients = [Beside(lambda client=client: ask(client)) for client in range(4)]
        settled(lambda: len(versions), lambda count: count > 20)
        # It is stopped first, so it has requests when it dies.
        dies.process.send_signal(signal.SIGSTOP)
        assert settled(lambda: worker_of(fleet, dies)["load"], lambda load: load > 0) > 0
        dies.process.send_signal(signal.SIGKILL)
        settled(lambda: worker_of(fleet, dies)["state"], lambda state: state == "down")
        # The trainer's group had two engines, so the next weights travel by files.
        folder = test_areal.checkpoint(tmp_path / "elsewhere", fleet, 3)
        with open(folder / "model.safetensors", "rb") as file:
            upload(fleet, file.read(), "step-3")
        stays.holds(3)
        restarted = Restarted(dies)
        fleet.engines[1] = restarted
        assert settled(lambda: worker_of(fleet, dies)["state"], lambda state: state == "ready", 180) == "ready", (
            fleet.get("/workers")
        )
        restarted.holds(3)
        assert restarted.version() == "step-3"
        mark = restarted.metric("refit:generation_tokens_total")
        settled(lambda: restarted.metric("refit:generation_tokens_total"), lambda count: count > mark)
        over.append(True)
        for client in clients:
            client.result()
        assert set(versions) <= {"step-1", "step-3"} and versions[-1] == "step-3"
        assert fleet.metric("refit:gateway_retries_total") >= 1
        assert 'refit:gateway_fills_total{from="peer",outcome="success"} 1' in fleet.get("/metrics")
        trainer.process.kill()


def test_weights_that_disagree_are_an_error_and_named(fleet):
    fleet.engines[0].post("/update_weight_version", dict(new_version="mine"))
    with pytest.raises(Exception, match="VERSIONS_DISAGREE|hold different weights"):
        fleet.get("/weight_version")
    errors = settled(lambda: fleet.get("/health")["errors"], lambda errors: len(errors) > 0)
    assert '"mine"' in errors[0]["message"] and errors[0]["url"] == fleet.engines[0].url, errors
    fleet.engines[1].post("/update_weight_version", dict(new_version="mine"))
    settled(lambda: fleet.get("/health")["status"], lambda status: status == "ok")
    assert fleet.get("/weight_version")["weight_version"] == "mine"


class Restarted(Engine):
    """A new process at the address of an ended one."""

    def __init__(self, before):
        self.port_before = before.port
        super().__init__(before.kind, before.ranks, before.device)

    def arguments(self, model):
        self.port, self.url = self.port_before, f"http://127.0.0.1:{self.port_before}"
        return super().arguments(model)


def worker_of(fleet, engine):
    return next(worker for worker in fleet.get("/workers")["workers"] if worker["url"] == engine.url)


def upload(fleet, data, version):
    import urllib.request

    request = urllib.request.Request(
        f"{fleet.url}/update_weights_from_tensor?weight_version={version}",
        data,
        {"content-type": "application/octet-stream"},
        method="POST",
    )
    with urllib.request.urlopen(request, timeout=300) as reply:
        assert json.load(reply)["success"] is True
