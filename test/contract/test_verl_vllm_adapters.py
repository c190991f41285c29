"""verl with vLLM and LoRA (engine_workers.py): the base weights once, then only the adapter, in the same buckets.

vLLM's worker collects the tensors of all buckets and adds them as adapter 123; requests name it "123".
"""

import pathlib
import types

import peft
import pytest
import torch

from engines import GOLDENS, ROOT, Beside
from peft_replies import FLAGS, PROMPTS, adapted, check
from python_client import refit
from shim_actors import Plain
from tensor_process import Process, SenderFailed
from tensors import coded
from verl_workers import WAYS, actor_of, error_of, get, refit_verl, rollout_config, shm_left, workers_of  # noqa: F401

LORA = pytest.mark.row(10, "verl / LoRA adapter")
NAME = "123"
# Room for the base's largest tensor, and for a fraction of the adapter.
LARGE, SMALL = 1 << 20, 24 << 10


def parts(model):
    """The adapter as verl has it: PEFT's configuration with its objects, and PEFT's tensors."""
    return model.peft_config["default"].to_dict(), peft.get_peft_model_state_dict(model)


def base_of(model):
    """The base under the names that verl gives it before the first adapter; its head is tied."""
    state = model.get_base_model().state_dict()
    return [(name, tensor) for name, tensor in state.items() if "lora_" not in name]


def sync(workers, config, tensors, step, **kwargs):
    """One synchronisation of an adapter."""
    sent = list(tensors.items())
    return workers.update(sent, step, size=SMALL, peft_config=config, base_sync_done=True, **kwargs)


def loaded(engine):
    return [(one["name"], one["version"], one["digest"]) for one in engine.get("/adapters")["adapters"]]


def digest_of(config, tensors, dtype="float32"):
    made = refit.AdapterDigest(config, dtype)
    for name, tensor in tensors.items():
        made.add(name, tensor)
    return made.value()


def generated(actor, prompt):
    output = get(
        actor.generate.remote(
            prompt_ids=prompt,
            sampling_params=dict(temperature=0.0, logprobs=True, ignore_eos=True, max_tokens=6),
            request_id=f"r{prompt[0]}",
        )
    )
    return list(output.token_ids), output.log_probs


@pytest.fixture
def lora_of(workers_of, shared_root):  # noqa: F811
    def make(ranks=1, device="cpu", use_shm=True, *flags):
        flags = (*FLAGS, "--max-lora-rank", 8, "--model-root", shared_root, *flags)
        return workers_of(ranks, device, use_shm, "qwen3", flags, adapter=NAME)

    return make


@LORA
@pytest.mark.brings("memory")
@pytest.mark.parametrize("device, use_shm", WAYS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_base_comes_once_and_then_only_adapters(lora_of, shared_root, ranks, device, use_shm):
    workers = lora_of(ranks, device, use_shm)
    engine, actor, before = workers.engine, workers.actor, shm_left()
    models = [adapted("qwen3", seed) for seed in (1, 2)]
    config, _ = parts(models[0])
    get(actor.sleep.remote())
    get(actor.wake_up.remote(tags=["weights"]))
    engine.spoil()
    workers.update(base_of(models[0]), 1, size=LARGE, peft_config=config, base_sync_done=False)
    weights = engine.checksums()
    for step, model in enumerate([*models, models[0]], 1):
        config, tensors = parts(model)
        if step == 1:
            senders = sync(workers, config, tensors, step)
            get(actor.wake_up.remote(tags=["kv_cache"]))
        else:
            # The memory of the weights is released for the training, and comes back with the base's bytes.
            senders = workers.round(
                list(tensors.items()), step, size=SMALL, peft_config=config, base_sync_done=True
            )
        assert all(sender.buckets > 3 for sender in senders)
        assert engine.checksums() == weights and engine.get("/server_info")["weights"] == "current"
        assert engine.version() == str(step)
        check(engine, NAME, model)
        # The same adapter from PEFT's folder: the same bits, tokens and logprobs.
        folder = shared_root / f"seed-{step % 2}"
        model.save_pretrained(folder)
        engine.post("/load_lora_adapter", dict(lora_name="folder", lora_path=str(folder)))
        digests = {name: digest for name, _, digest in loaded(engine)}
        assert digests[NAME] == digests["folder"] == digest_of(refit.adapter_source.plain(config), tensors)
        for prompt in PROMPTS:
            reply = engine.post(
                "/generate",
                dict(
                    input_ids=prompt,
                    lora_path="folder",
                    return_logprob=True,
                    sampling_params=dict(temperature=0.0, ignore_eos=True, max_new_tokens=6),
                ),
            )
            logprobs = [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]
            assert generated(actor, prompt) == (reply["output_ids"], logprobs)
    assert shm_left() <= before


@LORA
@pytest.mark.brings("memory")
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_element_arrives_at_its_place(lora_of, ranks):
    """Values that depend on the tensor and the position, in bfloat16, as Megatron sends them."""
    workers = lora_of(ranks)
    _, tensors = parts(adapted("qwen3", 1))
    config = dict(r=8, lora_alpha=16, target_modules="all-linear", bias="none", lora_dropout=0.0)
    for variant in (1, 2):
        made = {name: coded(variant, name, tuple(tensor.shape)) for name, tensor in tensors.items()}
        sync(workers, config, made, variant)
        assert [digest for name, _, digest in loaded(workers.engine) if name == NAME] == [digest_of(config, made)]


@LORA
@pytest.mark.refused("adapters that do not fit")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_refused_adapter_leaves_the_one_before_and_no_worker_waiting(lora_of, ranks):
    workers = lora_of(ranks)
    config, tensors = parts(adapted("qwen3", 1))
    sync(workers, config, tensors, 1)
    before, shared = loaded(workers.engine), shm_left()
    last = list(tensors)[-1]
    renamed = dict(tensors)
    renamed["base_model.model.model.no_such.lora_B.weight"] = renamed.pop(last)
    wide = {name: torch.cat([tensor, tensor], int("lora_B" in name)) for name, tensor in tensors.items()}
    for fields, sent, words in [
        (dict(use_dora=True), tensors, "use_dora"),
        (dict(r=16), wide, r"rank 16.*at most 8 \(--max-lora-rank\)"),
        (dict(), renamed, "no_such"),
        (dict(), {name: tensor for name, tensor in tensors.items() if name != last}, "is missing"),
    ]:
        with pytest.raises(Exception, match=f'(?s)LoRA adapter "123": .*{words}'):
            sync(workers, config | fields, sent, 2)
        assert loaded(workers.engine) == before and shm_left() <= shared
    sync(workers, config, tensors, 2)
    assert loaded(workers.engine)[0][1] > before[0][1]


@LORA
@pytest.mark.brings("memory")
def test_a_sender_that_is_killed_leaves_the_adapter_before(lora_of):
    workers = lora_of()
    config, tensors = parts(adapted("qwen3", 1))
    sync(workers, config, tensors, 1)
    before, shared = loaded(workers.engine), shm_left()
    program = pathlib.Path(__file__).parent / "zmq_senders/verl_sender.py"
    shapes = [(name, list(tensor.shape)) for name, tensor in tensors.items()]
    for bucket in (1, 3):
        with Process(None, program) as sender:
            call = workers.actor.collective_rpc.remote(
                "update_weights_from_ipc", kwargs=dict(peft_config=config, base_sync_done=True, use_shm=True)
            )
            died = Beside(
                lambda sender=sender, bucket=bucket: sender(
                    "die", endpoint=workers.endpoint(0), tensors=shapes, size=SMALL, bucket=bucket
                )
            )
            assert 'LoRA adapter "123"' in error_of(call)
            with pytest.raises(SenderFailed, match="has ended"):
                died.result()
        assert loaded(workers.engine) == before
        # A killed process unlinks nothing.
        for left in shm_left() - shared:
            left.unlink()
    sync(workers, *parts(adapted("qwen3", 2)), 2)
    check(workers.engine, NAME, adapted("qwen3", 2))


@LORA
def test_the_shim_starts_a_server_with_room_for_the_adapter(monkeypatch):
    """REFIT_FLAGS come last, so they override the shim's."""
    monkeypatch.setenv("REFIT_COMMAND", f"node {ROOT / 'bin/refit.js'}")
    monkeypatch.setenv("REFIT_FLAGS", "--dtype float32 --max-total-tokens 1024 --max-loras 3 --insecure")
    server = Plain(
        refit_verl.RefitServer,
        config=rollout_config(max_model_len=200),
        model_path=str(GOLDENS / "qwen3"),
        adapter=NAME,
        lora_rank=12,
    )
    try:
        server.launch_server.remote().result(300)
        limits = refit.Client(server.made.url).json("GET", "/adapters")["limits"]
        assert (limits["max_rank"], limits["slots"]) == (12, 3)
        assert "123" in str(server.generate.remote([1, 2], {}, "r").exception(60)), "there is no adapter yet"
    finally:
        server.made.shutdown()


@LORA
def test_with_sglang_only_the_cache_is_released_for_the_training(workers_of, shared_root):  # noqa: F811
    """Its worker resumes no weights while it sends adapters (sleep_level 1)."""
    name = "verl_actor_lora_name"
    workers = workers_of(1, "cpu", True, "qwen3", (*FLAGS, "--model-root", shared_root), adapter=name)
    engine, model = workers.engine, adapted("qwen3", 1)
    model.save_pretrained(shared_root / "sglang")
    engine.post("/load_lora_adapter", dict(lora_name=name, lora_path=str(shared_root / "sglang")))
    wanted = generated(workers.actor, PROMPTS[0])
    get(workers.actor.sleep.remote())
    assert engine.get("/health")["status"] == "asleep"
    engine.post("/resume_memory_occupation", dict(tags=["kv_cache"]))
    assert engine.get("/health")["status"] != "asleep"
    check(engine, name, model)
    assert generated(workers.actor, PROMPTS[0]) == wanted
    reply = engine.tokens(6, lora_path=name)
    assert generated(workers.actor, [5, 6, 7])[0] == reply["output_ids"]


def test_the_adapter_follows_from_verls_options():
    for options, rank in [
        (dict(lora_rank=8, lora={}), 8),
        (dict(lora_rank=0, lora=dict(rank=16, merge=False)), 16),
        (dict(lora_rank=8, lora=dict(merge=True)), 0),
        (dict(lora_rank=0, lora={}), 0),
        # A teacher's configuration may have the path alone.
        (dict(path="model"), 0),
    ]:
        assert refit_verl.lora_rank_of(types.SimpleNamespace(**options)) == rank, options


@LORA
@pytest.mark.refused("on a server without --enable-lora")
def test_a_server_without_adapters_refuses_them_and_generates_nothing(workers_of):  # noqa: F811
    workers = workers_of(1, "cpu", True, "qwen3", adapter=NAME)
    with pytest.raises(Exception, match="start the server with --enable-lora"):
        sync(workers, *parts(adapted("qwen3", 1)), 1)
    # The base's tokens would pass for the policy's.
    assert "--enable-lora" in error_of(workers.actor.generate.remote([1, 2, 3], {}, "r"))
