"""TRL's asynchronous GRPO with a plain vLLM.

All weights: pause, start, one packed update, finish, resume; it reads no status. A PEFT model and a server that takes
adapters: a folder and a name for each version, and requests that name theirs.
"""

import os
import random
import shutil

import pytest

from conftest import card_count
from engines import Beside, refusal
from peft_replies import FLAGS, adapted, check, fill
from vllm_wire import WIRES, Sending, Session, on_cards

NATIVE = pytest.mark.row(32, "TRL / vLLM native")
ADAPTERS = pytest.mark.row(33, "TRL / LoRA adapter")
STALENESS = 1
NAME = "trl-policy"


class Client:
    """Its VLLMClient: one attempt, and the reply is ignored."""

    def __init__(self, engine):
        self.engine = engine

    def get(self, path):
        return Session(self.engine).request("GET", path)

    def post(self, path, body=None):
        return Session(self.engine).post(path, body)


@NATIVE
@pytest.mark.brings("group")
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_one_packed_update_with_generation_frozen(engines, wire, ranks):
    if wire == "nccl" and card_count() < 1 + ranks:
        pytest.skip(f"needs {1 + ranks} NVIDIA GPUs")
    engine = engines("qwen3", ranks, on_cards(wire))
    client = Client(engine)
    assert client.get("/v1/models")["data"][0]["max_model_len"] > 0
    assert client.get("/get_world_size")["world_size"] == ranks
    sender = Sending(engine, wire, lambda info: client.post("/init_weight_transfer_engine", dict(init_info=info)))
    body = dict(
        model="policy",
        prompt=[5, 6, 7],
        max_tokens=200,
        temperature=1.0,
        n=1,
        return_token_ids=True,
        logprobs=0,
        ignore_eos=True,
    )
    try:
        engine.spoil()
        for variant in [3, 1, 2, 1]:
            client.post("/pause?mode=keep")
            # Torn weights generate nothing and are reported at once. The first update repairs them.
            running = None if variant == 3 else Beside(lambda: client.post("/v1/completions", body))
            assert client.post("/start_weight_update", dict(is_checkpoint_format=True)) == {
                "message": "Weight update started"
            }
            sender.send(
                lambda lists: client.post("/update_weights", dict(update_info={**lists, "packed": True})),
                variant,
                list(engine.shapes),
                1 << 30,
            )
            assert client.post("/finish_weight_update") == {"message": "Weight update finished"}
            assert running is None or not running.done, "it waits for the resume"
            client.post("/resume")
            engine.holds(variant)
            if running is not None:
                choice = running.result()["choices"][0]
                assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) == 200
    finally:
        sender.close()


class Trainer:
    """AsyncGRPOTrainer._sync_weight_lora. Its VLLMClient makes one attempt, and reads the status of loads alone."""

    def __init__(self, engine, folder):
        self.engine, self.folder, self.version = engine, folder, 0

    def config(self):
        return self.engine.get("/server_info?config_format=json")["vllm_config"]

    def sync(self, model, during=lambda: None):
        version = self.version + 1
        folder = self.folder / f"{NAME}-v{version}"
        self.post("/pause?mode=keep")
        save(model, folder)
        self.engine.post(
            "/v1/load_lora_adapter", dict(lora_name=folder.name, lora_path=str(folder), load_inplace=False)
        )
        during()
        self.post("/resume")
        stale = version - (STALENESS + 1)
        if stale > 0:
            self.post("/v1/unload_lora_adapter", dict(lora_name=f"{NAME}-v{stale}"))
        if stale > 1:
            shutil.rmtree(self.folder / f"{NAME}-v{stale - 1}")
        self.version = version
        return folder.name

    def post(self, path, body=None):
        return Session(self.engine).post(path, body)

    def turn(self, prompt, name=None, **fields):
        """The rollout loop: the version is in the name of the model."""
        body = dict(
            model=name or f"{NAME}-v{self.version}",
            prompt=prompt,
            max_tokens=8,
            temperature=1.0,
            top_p=1.0,
            top_k=-1,
            repetition_penalty=1.0,
            n=1,
            return_token_ids=True,
            logprobs=0,
            seed=random.Random(self.version).getrandbits(63),
        )
        choice = self.engine.post("/v1/completions", body | fields)["choices"][0]
        assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"])
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def save(model, folder):
    """save_lora_adapter: beside its place, then renamed."""
    beside = folder.parent / f".{folder.name}.tmp"
    model.save_pretrained(beside)
    os.rename(beside, folder)


def loaded(engine):
    return [entry["id"] for entry in engine.get("/v1/models")["data"][1:]]


@pytest.fixture
def trainer(engines, shared_root, tmp_path):
    def start(ranks):
        engine = engines("qwen3", ranks, "cpu", *FLAGS, "--max-loras", STALENESS + 2, "--model-root", shared_root)
        folder = shared_root / tmp_path.name / ".vllm_lora"
        folder.mkdir(parents=True)
        return engine, Trainer(engine, folder)

    return start


@ADAPTERS
@pytest.mark.brings("files")
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_version_has_a_name_and_the_oldest_is_unloaded(trainer, ranks):
    engine, trl = trainer(ranks)
    config = trl.config()
    assert config["parallel_config"]["data_parallel_size"] == 1
    assert config["lora_config"]["max_lora_rank"] >= 8
    assert config["lora_config"]["max_loras"] >= STALENESS + 2
    model = adapted("qwen3", 1)
    weights = engine.checksums()
    for version in range(1, 5):
        name = trl.sync(fill(model, version, size=0.08))
        check(engine, name, model)
        assert loaded(engine) == [f"{NAME}-v{one}" for one in range(max(1, version - 1), version + 1)]
        assert engine.get("/is_paused") == {"is_paused": False}
        trl.turn([5, 6, 7])
    # Requests that still name the version before are served by it.
    check(engine, f"{NAME}-v3", fill(model, 3, size=0.08))
    with refusal(404) as found:
        trl.turn([5, 6, 7], name=f"{NAME}-v2")
    assert f"{NAME}-v2" in found["body"]
    assert engine.checksums() == weights, "no weight of the base has moved"
    for name in loaded(engine):
        trl.post("/v1/unload_lora_adapter", dict(lora_name=name))


@ADAPTERS
@pytest.mark.brings("files")
def test_a_request_that_runs_through_a_sync_ends_on_its_version(trainer):
    """The same tokens as without a sync: it is frozen, and its version stays until it ends."""
    engine, trl = trainer(1)
    model = adapted("qwen3", 11)
    first = trl.sync(model)
    long = dict(max_tokens=400, temperature=0, ignore_eos=True, seed=7)
    alone = trl.turn([5, 6, 7], name=first, **long)
    running = Beside(lambda: trl.turn([5, 6, 7], name=first, **long))

    def is_frozen():
        assert not running.done, "it waits for the resume"

    second = trl.sync(fill(model, 12, size=0.08), during=is_frozen)
    trl.post("/v1/unload_lora_adapter", dict(lora_name=first))
    assert running.result() == alone
    assert trl.turn([5, 6, 7], name=second, **long) != alone
    trl.post("/v1/unload_lora_adapter", dict(lora_name=second))


@ADAPTERS
def test_a_folder_that_is_no_adapter_is_refused_and_the_version_stays(trainer):
    """TRL raises at every status but 200, after which training ends."""
    engine, trl = trainer(1)
    model = adapted("qwen3", 21)
    first = trl.sync(model)
    (trl.folder / "empty").mkdir()
    for folder in ["absent", "empty"]:
        with refusal(404) as found:
            engine.post("/v1/load_lora_adapter", dict(lora_name="x", lora_path=str(trl.folder / folder)))
        assert folder in found["body"], found
    with refusal(400) as again:
        engine.post("/v1/load_lora_adapter", dict(lora_name=first, lora_path=str(trl.folder / first)))
    assert "already" in again["body"]
    check(engine, first, model)
    trl.post("/v1/unload_lora_adapter", dict(lora_name=first))


@ADAPTERS
@pytest.mark.refused("on a server without --enable-lora (TRL asks /server_info, and merges)")
def test_a_server_without_adapters_says_so(engines):
    engine = engines("qwen3")
    assert Trainer(engine, None).config()["lora_config"] is None
    with refusal(400) as found:
        engine.post("/v1/load_lora_adapter", dict(lora_name=f"{NAME}-v1", lora_path="/tmp/x"))
    assert "--enable-lora" in found["body"]
