"""prime-rl: its orchestrator posts over HTTP, its trainer broadcasts state dicts with their sizes."""

import json
import pathlib
import shutil

import pytest

from distributed_group import free_port
from engines import Beside, Refused, refusal, settled
from peft_replies import FLAGS as LORA_FLAGS
from peft_replies import adapted, check
from tensor_process import Process, SenderFailed

NCCL = pytest.mark.row(22, "prime-rl / NCCL")
FILES = pytest.mark.row(23, "prime-rl / filesystem")
LORA = pytest.mark.row(24, "prime-rl / LoRA")
WAYS = ["gloo", pytest.param("nccl", marks=pytest.mark.cards(2))]
GROUP_TIMEOUT_S = 60


@pytest.fixture
def trainer():
    process = Process(
        {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}, pathlib.Path(__file__).parent / "broadcaster.py"
    )
    yield process
    process.kill()


def served(engines, backend, ranks=1):
    """The trainer uses GPU 0."""
    device = "cuda" if backend == "nccl" else "cpu"
    env = {"CUDA_VISIBLE_DEVICES": ",".join(str(card) for card in range(1, 1 + ranks))} if backend == "nccl" else None
    return engines("qwen3", ranks, device, "--group-timeout", GROUP_TIMEOUT_S, env=env)


def init(engine, backend, port, **fields):
    body = dict(
        host="127.0.0.1",
        port=port,
        rank_offset=0,
        inference_world_size=engine.ranks,
        timeout=1200,
        quantize_in_weight_transfer=False,
        backend=backend,
    )
    return engine.post("/init_broadcaster", body | fields)


def joined(engine, trainer, backend):
    port = free_port()
    replied = Beside(lambda: init(engine, backend, port))
    trainer("join", backend=backend, name="prime-rl", address="127.0.0.1", port=port, rank=0, world=1 + engine.ranks)
    assert replied.result() == {"status": "ok"}


def layers(engine, dtype="bfloat16"):
    """One state dict for the tensors outside the layers, then one for each layer."""
    names = list(engine.shapes)
    prefixes = sorted({name.split(".")[2] for name in names if name.startswith("model.layers.")}, key=int)
    dicts = [[name for name in names if not name.startswith("model.layers.")]]
    dicts += [[name for name in names if name.startswith(f"model.layers.{layer}.")] for layer in prefixes]
    return [[(name, list(engine.shapes[name]), dtype) for name in group] for group in dicts]


class Update:
    """The orchestrator: pause with keep, mark the folder, post while the trainer broadcasts, resume in every case."""

    def __init__(self, engine, trainer, folder, variant, dicts=None, **sent):
        self.engine, self.folder = engine, folder
        engine.post("/pause?mode=keep&clear_cache=false")
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "NCCL_READY").touch()
            asked = Beside(self.ask)
            trainer.begin("state_dicts", variant=variant, dicts=layers(engine) if dicts is None else dicts, **sent)
            self.sent = self.end(trainer)
            try:
                self.reply, self.refused = asked.result(), None
            except Refused as error:
                self.reply, self.refused = None, error
        finally:
            engine.post("/resume")

    def ask(self):
        return self.engine.post(
            "/update_weights", dict(weight_dir=None if self.folder is None else self.folder.as_posix()), timeout=720
        )

    def end(self, trainer):
        try:
            return trainer.end()
        except SenderFailed as error:
            return error

    def ok(self):
        assert not isinstance(self.sent, Exception), (self.sent, self.refused)
        assert self.refused is None, self.refused
        assert self.reply == {"status": "ok"}


@NCCL
@pytest.mark.brings("group")
@pytest.mark.parametrize("backend", WAYS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_go_to_a_to_b_and_back_to_a(engines, trainer, tmp_path, backend, ranks):
    if backend == "nccl" and ranks == 2:
        pytest.skip("two cards: the trainer's and one more")
    engine = served(engines, backend, ranks)
    assert engine.get("/v1/models")["data"]
    joined(engine, trainer, backend)
    engine.spoil()
    for step, variant in enumerate([1, 2, 1]):
        Update(engine, trainer, tmp_path / f"broadcasts/step_{step}", variant).ok()
        engine.holds(variant)
        assert engine.metric("refit:weights_torn") == 0
    # The trainer keeps no folder here, so none is named.
    Update(engine, trainer, None, 2).ok()
    engine.holds(2)
    trainer("leave")


@NCCL
def test_an_update_without_tensors_is_refused(engines, trainer, tmp_path):
    engine = served(engines, "gloo")
    joined(engine, trainer, "gloo")
    Update(engine, trainer, tmp_path / "step-0", 1).ok()
    update = Update(engine, trainer, tmp_path / "step-1", 2, dicts=[[], []])
    assert update.refused.status == 400 and "no weight of this model" in update.refused.body
    engine.holds(1)
    Update(engine, trainer, tmp_path / "step-2", 3).ok()
    engine.holds(3)


@NCCL
@pytest.mark.brings("group")
@pytest.mark.parametrize("backend", WAYS)
def test_the_prefix_cache_is_kept_apart_by_the_salt(engines, trainer, tmp_path, backend):
    """A paused request goes on. Cached tokens from before the update stay under their salt."""
    engine = served(engines, backend)
    joined(engine, trainer, backend)
    Update(engine, trainer, tmp_path / "step_1", 1).ok()
    prompt = list(range(3, 60))
    body = dict(
        token_ids=prompt,
        cache_salt="1",
        sampling_params=dict(max_tokens=200, ignore_eos=True, temperature=0),
        model="default",
    )
    running = Beside(lambda: engine.post("/inference/v1/generate", body))
    settled(lambda: engine.metric("refit:num_requests_running"), lambda count: count > 0 or running.done)
    Update(engine, trainer, tmp_path / "step_2", 2).ok()
    engine.holds(2)
    assert len(running.result()["choices"][0]["token_ids"]) == 200, "it was frozen, not ended"
    trainer("leave")


@NCCL
@pytest.mark.brings("group")
def test_each_dtype_of_a_state_dict_is_broadcast_alone(engines, trainer, tmp_path):
    """One flat tensor for each dtype, in the order of the metadata."""
    engine = served(engines, "gloo")
    joined(engine, trainer, "gloo")
    dicts = [
        [(name, shape, "float32" if index % 3 == 1 else "bfloat16") for index, (name, shape, _) in enumerate(group)]
        for group in layers(engine)
    ]
    Update(engine, trainer, tmp_path / "step_1", 3, dicts).ok()
    engine.holds(3)
    trainer("leave")


@NCCL
@pytest.mark.brings("group")
def test_a_repeated_request_does_not_hang(engines, trainer, tmp_path):
    """httpx repeats a request without a reply. The trainer has sent already, and does not send again."""
    engine = served(engines, "gloo")
    joined(engine, trainer, "gloo")
    folder = tmp_path / "step_1"
    body = dict(weight_dir=folder.as_posix())
    engine.post("/pause?mode=keep&clear_cache=false")
    asked = [Beside(lambda: engine.post("/update_weights", body)) for _ in range(3)]
    trainer("state_dicts", variant=1, dicts=layers(engine))
    assert [one.result() for one in asked] == [{"status": "ok"}] * 3, "those that ask while it runs join it"
    # A wait for a broadcast that nobody sends would give another error.
    assert engine.post("/update_weights", body) == {"status": "ok"}, "and one that comes later has its outcome"
    engine.post("/resume")
    engine.holds(1)
    Update(engine, trainer, tmp_path / "step_2", 2).ok()
    engine.holds(2)
    trainer("leave")


@NCCL
def test_a_trainer_that_breaks_off_causes_no_retry(engines, trainer, tmp_path):
    engine = served(engines, "gloo")
    joined(engine, trainer, "gloo")
    Update(engine, trainer, tmp_path / "step_1", 1).ok()
    folder = tmp_path / "step_2"
    engine.post("/pause?mode=keep&clear_cache=false")
    asked = Beside(lambda: engine.post("/update_weights", dict(weight_dir=folder.as_posix())))
    trainer("state_dicts", variant=2, dicts=layers(engine), upto=2)
    trainer.kill()
    with refusal(409) as found:
        asked.result()
    assert all(word in found["body"] for word in ["BROADCAST_SPENT", "WEIGHTS_TORN", "process group"])
    torn = [name for group in layers(engine)[:2] for name, *_ in group]
    health = engine.get("/health")
    assert health["status"] == "torn" and set(health["weights"]["tensors"]) == set(torn), (
        "what had been written is of no model"
    )
    with refusal(409) as again:
        engine.post("/update_weights", dict(weight_dir=folder.as_posix()))
    assert again["body"] == found["body"]
    with refusal(409) as other:
        engine.post("/update_weights", dict(weight_dir=(tmp_path / "step_3").as_posix()))
    assert "initialise it again" in other["body"]
    engine.post("/resume")
    # A new trainer starts with a new group.
    fresh = Process(
        {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}, pathlib.Path(__file__).parent / "broadcaster.py"
    )
    try:
        joined(engine, fresh, "gloo")
        Update(engine, fresh, folder, 2).ok()
        engine.holds(2)
        assert engine.metric("refit:weights_torn") == 0
    finally:
        fresh.kill()


@NCCL
@pytest.mark.parametrize("at", [0, 1])
def test_a_refused_update_is_received_to_the_end_and_the_group_goes_on(engines, trainer, tmp_path, at):
    engine = served(engines, "gloo")
    joined(engine, trainer, "gloo")
    Update(engine, trainer, tmp_path / "step_1", 1).ok()
    dicts = layers(engine)
    dicts[at][0] = ("nobody", *dicts[at][0][1:])
    update = Update(engine, trainer, tmp_path / "step_2", 2, dicts)
    assert not isinstance(update.sent, Exception), "all that the trainer sends is taken"
    assert update.refused.status in (400, 409) and "nobody" in update.refused.body and "dropped" in update.refused.body
    if at == 0:
        engine.holds(1)
        assert engine.get("/health")["status"] == "ok", "nothing has changed"
    else:
        health = engine.get("/health")
        assert health["status"] == "torn" and set(health["weights"]["tensors"]) == {
            name for name, *_ in layers(engine)[0]
        }
    Update(engine, trainer, tmp_path / "step_3", 2).ok()
    engine.holds(2)
    assert engine.get("/health")["status"] == "ok"
    trainer("leave")


@NCCL
@pytest.mark.parametrize(
    "sent",
    [
        dict(count=-1),
        dict(count=1 << 40),
        dict(metadata="80044e2e"),
        dict(metadata="00"),
        dict(metadata="80048c056f732e7379948c0673797374656d9493948c026c739485942e"),
    ],
    ids=["no count", "too many", "no dict", "no pickle", "a call"],
)
def test_unreadable_metadata_ends_the_group(engines, trainer, tmp_path, sent):
    engine = served(engines, "gloo")
    joined(engine, trainer, "gloo")
    Update(engine, trainer, tmp_path / "step_1", 1).ok()
    update = Update(engine, trainer, tmp_path / "step_2", 2, **sent)
    assert isinstance(update.sent, SenderFailed), "the trainer's broadcast fails, and it knows"
    assert update.refused.status == 400 and "aborted" in update.refused.body, update.refused
    engine.holds(1)


@NCCL
def test_impossible_requests_are_refused_at_once(engines):
    engine = served(engines, "gloo")
    with refusal(400) as quantized:
        init(engine, "gloo", free_port(), quantize_in_weight_transfer=True)
    assert "quantize_in_weight_transfer" in quantized["body"]
    with refusal(400) as nixl:
        init(engine, "nccl", free_port(), session_id="default")
    assert "NIXL" in nixl["body"]
    with refusal(400) as nccl:
        init(engine, "nccl", free_port())
    assert "NCCL needs GPUs" in nccl["body"]
    with refusal(400):
        init(engine, "gloo", free_port(), rank_offset=3)
    fresh = engines("qwen3", 1, "cpu", which="fresh")
    with refusal(400) as nobody:
        fresh.post("/update_weights", dict(weight_dir=None))
    assert "/init_broadcaster" in nobody["body"]


@FILES
@pytest.mark.brings("files")
def test_a_checkpoint_is_loaded_from_its_folder(engines, tmp_path_factory):
    """Before or without a group the trainer writes a checkpoint and names its folder."""
    import safetensors.torch

    from engines import GOLDENS

    root = tmp_path_factory.mktemp("prime-rl")
    engine = engines("qwen3", 1, "cpu", "--model-root", root)
    for step, variant in enumerate([1, 2]):
        folder = root / f"broadcasts/step_{step}"
        folder.mkdir(parents=True)
        shutil.copy(GOLDENS / "qwen3/config.json", folder)
        safetensors.torch.save_file(dict(engine.tensors(variant)), folder / "model.safetensors")
        (folder / "STABLE").touch()
        engine.post("/pause?mode=keep&clear_cache=false")
        assert engine.post("/update_weights", dict(weight_dir=folder.as_posix())) == {"status": "ok"}
        assert engine.post("/update_weights", dict(weight_dir=folder.as_posix())) == {"status": "ok"}, (
            "a repeated request does the same again"
        )
        engine.post("/resume")
        engine.holds(variant)
    engine.post("/pause?mode=keep&clear_cache=false")
    with refusal(400) as absent:
        engine.post("/update_weights", dict(weight_dir=(root / "broadcasts/step_9").as_posix()))
    assert "step_9" in absent["body"]
    engine.post("/resume")
    engine.holds(2)


@LORA
@pytest.mark.brings("files")
@pytest.mark.parametrize("generation", ["own name", "model's name"])
def test_each_step_is_a_folder_that_replaces_the_adapter(engines, shared_root, generation):
    """Its own name by /load_lora_adapter; since #3358 the model's name by /update_weights, which finds the config."""
    engine = engines("qwen3", 1, "cpu", *LORA_FLAGS, "--model-root", shared_root)
    name = "r8-a16.0" if generation == "own name" else engine.get("/v1/models")["data"][0]["id"]
    for step in (1, 2):
        model = adapted("qwen3", step)
        folder = shared_root / generation.replace("'", "") / f"step_{step}"
        model.save_pretrained(folder)
        if generation == "own name":
            reply = engine.post("/load_lora_adapter", dict(lora_name=name, lora_path=str(folder)))
        else:
            reply = engine.post("/update_weights", dict(weight_dir=str(folder)))
        assert reply["status"] == "ok"
        check(engine, name, model)
        body = dict(model=name, prompt=[5, 6], max_tokens=1, cache_salt=str(step))
        assert engine.post("/v1/completions", body)["model"] == name
    if generation == "own name":
        engine.post("/v1/unload_lora_adapter", dict(lora_name=name))
        with refusal(404):
            engine.post("/v1/completions", dict(model=name, prompt=[5], max_tokens=1))


@LORA
@pytest.mark.refused("on a server without --enable-lora")
def test_adapters_are_refused_with_a_status_that_causes_no_retry(engines):
    """The client retries 404 and 500 for two minutes."""
    engine = engines("qwen3")
    with refusal(400) as found:
        engine.post("/load_lora_adapter", dict(lora_name="policy", lora_path="/data/broadcasts/step_1"))
    assert "--enable-lora" in json.loads(found["body"])["error"]["message"]
    with refusal(400):
        engine.post("/v1/unload_lora_adapter", dict(lora_name="policy"))
