"""add_adapter of clients/python/refit: every transport, sharded models, and senders that die."""

import multiprocessing
import os
import signal
import time
import weakref

import pytest
import torch

import peft_adapters
from conftest import Server
from peft_adapters import base_of, farthest, fill, logprobs, peft_model
from python_client import refit

pytestmark = pytest.mark.usefixtures("nothing_left")

FIELDS = dict(r=8, lora_alpha=16, target_modules="all-linear")
PROMPT = [3, 5, 77, 120, 300, 41, 7]


@pytest.fixture(scope="module")
def engine(model_of, shared_folder):
    flags = ["--enable-lora", "--max-lora-rank", 16, "--max-total-tokens", 512, "--skip-tokenizer-init"]
    server = Server(
        model_of("qwen3").folder, *flags, "--dtype", "float32", "--tp", 2, "--model-root", shared_folder
    )
    yield server
    server.stop()


@pytest.fixture(scope="module")
def base(model_of):
    return base_of(model_of("qwen3").folder)


def score(client, name):
    fields = dict(return_logprob=True, logprob_start_len=0, lora_path=name)
    meta = client.generate(PROMPT, dict(max_new_tokens=0), **fields)["meta_info"]
    return [entry[0] for entry in meta["input_token_logprobs"][1:]]


@pytest.mark.parametrize("way", ["handles", "kept", "upload", "file", "group"])
def test_each_update_replaces_the_adapter_and_its_digest_is_the_senders(engine, base, shared_folder, way):
    client, name = refit.Client(engine.url), f"policy/ü {way}"
    model = peft_model(base, 1, **FIELDS)
    group = client.group(backend="gloo", timeout_s=60) if way == "group" else None
    own = dict(group=group) if group else dict(folder=shared_folder) if way == "file" else dict(transport=way)
    reports = []
    for seed in (1, 2, 1):
        fill(model, seed)
        reports.append(client.add_adapter(name, model, verify=True, **own))
        assert farthest(score(client, name), logprobs(model, PROMPT)) < 2e-5
    first, second, third = reports
    assert first["digest"] == third["digest"] != second["digest"]
    assert first["version"] < second["version"] < third["version"]
    assert (second["replaced"], third["replaced"]) == (first["version"], second["version"])
    with pytest.raises(refit.RefitError) as refused:
        client.add_adapter(name, model, replace=False, **own)
    assert refused.value.code == "CONFLICT"
    held = [one for one in client.adapters() if one["name"] == name]
    assert [one["version"] for one in held] == [third["version"]]
    assert client.unload_adapter(name, in_use="wait")["version"] == third["version"]
    with pytest.raises(refit.RefitError) as unknown:
        client.unload_adapter(name)
    assert (unknown.value.status, unknown.value.code) == (404, "ADAPTER_UNKNOWN")
    if group:
        group.leave()
    if way == "kept":
        assert len(client.release_kept()) == 1


def test_kept_adapters_are_sent_once_and_named_afterwards(engine, base, monkeypatch, tmp_path):
    client, model = refit.Client(engine.url), peft_model(base, 1, **FIELDS)
    offered = []
    monkeypatch.setattr(refit.transports, "pickled", lambda obj, real=refit.pickled: offered.append(1) or real(obj))

    def load(name, seed, **options):
        offered.clear()
        report = client.add_adapter(name, fill(model, seed), transport="kept", verify=True, **options)
        assert farthest(score(client, name), logprobs(model, PROMPT)) < 2e-5
        return len(offered), report

    assert load("policy-v1", 1)[0] == 1
    # The next version under the same name, and one under a name of its own, as some trainers have them.
    assert [load(name, seed)[0] for name, seed in [("policy-v1", 2), ("policy-v2", 3), ("policy-v2", 1)]] == [0, 0, 0]
    first = score(client, "policy-v1")
    fill(model, 2)
    assert farthest(first, logprobs(model, PROMPT)) < 2e-5, "the earlier version does not change with the memory"
    assert len(client.release_kept()) == 1
    assert load("policy-v2", 2)[0] == 1, "released: handles again"
    client.call("POST", "/release_kept_tensors", {})
    assert load("policy-v2", 3)[0] == 1, "the server had forgotten: handles again"
    with pytest.raises(refit.RefitError) as refused:
        client.add_adapter("policy-v2", model, transport="kept", replace=False)
    assert refused.value.code == "CONFLICT"
    assert load("policy-v3", 2, replace=False)[1].get("replaced") is None
    # Another layout has memory of its own, and the first one stays.
    model.add_adapter("small", peft_adapters.LoraConfig(**dict(FIELDS, r=4)))
    for sent in (1, 0):
        offered.clear()
        report = client.add_adapter("small", model, adapter_name="small", transport="kept", verify=True)
        assert (report["rank"], len(offered)) == (4, sent)
    # A refused load leaves the memory as it is.
    tensors = peft_adapters.get_peft_model_state_dict(model, adapter_name="small")
    with pytest.raises(refit.RefitError) as refused:
        client.add_adapter("bad", (dict(r=3), tensors), transport="kept")
    assert refused.value.code == "ADAPTER_REFUSED"
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="a folder is sent by"):
        client.add_adapter("x", tmp_path, transport="kept")
    assert len(client.release_kept()) == 2
    for name in ("policy-v1", "policy-v2", "policy-v3", "small"):
        client.unload_adapter(name)


def test_forms_of_an_adapter(engine, base, shared_folder):
    client, model = refit.Client(engine.url), peft_model(base, 4, **FIELDS)
    tensors = peft_adapters.get_peft_model_state_dict(model)
    model.save_pretrained(shared_folder / "forms")
    # PEFT finds this one's tensors too when it searches for those of "default".
    model.add_adapter("default2", peft_adapters.LoraConfig(**dict(FIELDS, r=4)))
    config = model.peft_config["default"]
    sent = [model, (config, tensors), (config.to_dict(), list(tensors.items())), shared_folder / "forms"]
    digests = {client.add_adapter("form", one, verify=True)["digest"] for one in sent}
    assert len(digests) == 1
    other = client.add_adapter("form", model, adapter_name="default2", dtype=torch.bfloat16, verify=True)
    assert other["rank"] == 4 and other["digest"] not in digests
    # Several engines: all get it, and those that refuse are named.
    both = refit.Clients([engine.url, refit.Client(engine.url)])
    assert {report["digest"] for report in both.add_adapter("form", model).values()} == digests
    with pytest.raises(refit.EnginesFailed) as failed:
        both.add_adapter("form", (dict(r=3), tensors))
    assert failed.value.code == "ADAPTER_REFUSED"
    for wrong, error in [(3, TypeError), ((config, {}), ValueError), (shared_folder / "none", FileNotFoundError)]:
        with pytest.raises(error):
            client.add_adapter("form", wrong)
    with pytest.raises(refit.RefitError, match="digest here is"):
        refit.AdapterDigest.value, kept = lambda self: "0" * 16, refit.AdapterDigest.value
        try:
            client.add_adapter("form", model, verify=True)
        finally:
            refit.AdapterDigest.value = kept
    client.unload_adapter("form")


def sharded(rank, folder, url, store, pipe):
    """A rank of a trainer: the model and its adapter are sharded (FSDP2), and gathered tensor by tensor."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from refit import adapters

    # transformers loads tensors on several threads, and after a fork torch may fail when two begin at once.
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model, mesh = peft_model(base_of(folder), 1, **FIELDS), init_device_mesh("cpu", (2,))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    gathered, alive = [], []

    def full(tensor):
        assert hasattr(tensor, "full_tensor"), "it is sharded"
        alive.append(sum(ref() is not None for ref in gathered))
        whole = tensor.full_tensor()
        gathered.append(weakref.ref(whole))
        return whole

    adapters.full = full
    client = refit.Client(url)
    for step in (1, 2):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.mul_(1 + step)
        report = client.add_adapter("sharded", model, verify=True, process_group=dist.group.WORLD)
    count, adapters.full, refused = len(gathered), lambda tensor: tensor, None
    try:
        client.add_adapter("sharded", (dict(r=3), {"x": torch.zeros(2)}), process_group=dist.group.WORLD)
    except refit.RefitError as error:
        # Rank 0 is refused, and all of them hear of it.
        refused = error.code
    pipe.send((report["version"], report["digest"], refused, count, max(alive)))
    dist.barrier()
    os._exit(0)


def test_a_sharded_model_is_gathered_tensor_by_tensor(engine, base, model_of, tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    fork, pipes, ranks = multiprocessing.get_context("fork"), [], []
    for rank in range(2):
        mine, theirs = fork.Pipe()
        arguments = (rank, str(model_of("qwen3").folder), engine.url, tmp_path / "store", theirs)
        ranks.append(fork.Process(target=sharded, args=arguments))
        ranks[-1].start()
        pipes.append(mine)
    assert all(pipe.poll(120) for pipe in pipes)
    replies = [pipe.recv() for pipe in pipes]
    for rank in ranks:
        rank.join(60)
    version, digest, refused, count, alive = replies[0]
    assert replies[1] == replies[0] and refused == "ADAPTER_REFUSED"
    # One that is alive: the one that was sent last.
    assert count == 2 * 28 and alive <= 1
    model = peft_model(base, 1, **FIELDS)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.mul_(6)
    client = refit.Client(engine.url)
    assert farthest(score(client, "sharded"), logprobs(model, PROMPT)) < 2e-5
    again = client.add_adapter("sharded", model)
    assert (again["digest"], again["replaced"]) == (digest, version)
    client.unload_adapter("sharded")


def test_a_sender_that_is_killed_midway_leaves_the_old_version(engine, base):
    client, model = refit.Client(engine.url), peft_model(base, 1, **FIELDS)
    before = client.add_adapter("policy", model, transport="upload", verify=True)
    old, sending = score(client, "policy"), multiprocessing.get_context("fork").Event()

    def half():
        real = refit.SafetensorsBody.parts

        def parts(self):
            pieces = list(real(self))
            yield from pieces[: len(pieces) // 2]
            sending.set()
            time.sleep(600)

        refit.SafetensorsBody.parts = parts
        refit.Client(engine.url).add_adapter("policy", fill(model, 2), transport="upload")

    sender = multiprocessing.get_context("fork").Process(target=half)
    sender.start()
    assert sending.wait(60)
    os.kill(sender.pid, signal.SIGKILL)
    sender.join()
    held = [one for one in client.adapters() if one["name"] == "policy"]
    assert [(one["version"], one["digest"]) for one in held] == [(before["version"], before["digest"])]
    assert score(client, "policy") == old
    after = client.add_adapter("policy", fill(model, 2), transport="upload", verify=True)
    assert after["replaced"] == before["version"] and score(client, "policy") != old
    client.unload_adapter("policy")
