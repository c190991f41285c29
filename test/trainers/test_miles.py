"""miles' LoRA: its adapter over handles or through a process group, once for each step, while generation is paused.

Read at radixark/miles: update_weight_from_tensor.py at 02a214e8, update_weight_from_distributed/mixin.py at 0015b711,
lora_utils.py at 01ad7e9b, and the client of the engines in the same tree. miles drives SGLang's routes; it is no row of
the matrix.
"""

import contextlib
import gc
import hashlib
import json

import pytest
import torch
from distributed_group import Group, trainer
from engines import GOLDENS, Beside, Refused, refusal
from peft_adapters import base_of, get_peft_model_state_dict, peft_model
from peft_replies import FLAGS as LORA_FLAGS
from peft_replies import adapted, check
from python_client import refit
from slime_client import Failed, SlimeEngine
from tensor_process import shared_files
from tensors import coded, serialize

NAME, GROUP = "miles_lora", "miles"
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# build_lora_sync_config: no more fields than these.
CONFIG = dict(
    peft_type="LORA",
    r=8,
    lora_alpha=16,
    target_modules=MODULES,
    lora_dropout=0.0,
    bias="none",
    task_type="CAUSAL_LM",
)


class MilesEngine(SlimeEngine):
    """miles' client of an engine. Its bodies have these fields and no others."""

    def pause_generation(self, mode):
        assert self.raw("POST", "/pause_generation", dict(mode=mode))[0] == 200

    def unload_lora_adapter(self):
        return self.make_request("unload_lora_adapter", dict(lora_name=NAME))

    def load_from_tensors(self, entries, config=CONFIG, **expected):
        body = dict(lora_name=NAME, config_dict=config, pinned=False, serialized_named_tensors=entries, **expected)
        return self.make_request("load_lora_adapter_from_tensors", body)

    def load_from_distributed(self, names, shapes, config=CONFIG, upsert=False):
        return self.make_request(
            "load_lora_adapter_from_distributed",
            dict(
                lora_name=NAME,
                config_dict=config,
                names=names,
                dtypes=["bfloat16"] * len(names),
                shapes=shapes,
                group_name=GROUP,
                pinned=False,
                upsert=upsert,
            ),
        )


def tensors_of(model):
    return {name: tensor.clone() for name, tensor in get_peft_model_state_dict(model).items()}


def hashes(tensors):
    """--check-lora-weight-equal."""
    return {
        name: hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
def test_colocated_the_adapter_is_unloaded_and_sent_by_handles(engines, ranks, mode):
    """One pickle for each rank of the engine, each of the whole adapter; the first unload finds nothing."""
    engine = engines("qwen3", ranks, "cpu", *LORA_FLAGS)
    client, before = MilesEngine(engine.url), shared_files()
    for seed in (1, 2, 3):
        model = adapted("qwen3", seed)
        # Each rank of the trainer has its own copy.
        copies = [tensors_of(model) for _ in range(ranks)]
        client.pause_generation(mode)
        client.flush_cache()
        with contextlib.suppress(Failed):
            client.unload_lora_adapter()
        expected = {} if seed == 1 else dict(expected_checksums=hashes(copies[0]))
        reply = client.load_from_tensors([serialize(tensors) for tensors in copies], **expected)
        assert reply["success"] is True and reply["loaded_adapters"] == {NAME: "__tensor__"}
        # An engine that does not report this has ignored the field.
        assert reply.get("checksums_verified") is (True if expected else None)
        del copies
        gc.collect()
        # The server may return those of an earlier test only now.
        assert set(shared_files()) <= set(before), "every handle was given back"
        client.continue_generation()
        check(engine, NAME, model)
    client.unload_lora_adapter()
    with pytest.raises(Failed, match="unload_lora_adapter: 400"):
        client.unload_lora_adapter()


def test_colocated_wrong_checksums_are_refused_and_no_adapter_is_left(engines):
    engine = engines("qwen3", 1, "cpu", *LORA_FLAGS)
    client = MilesEngine(engine.url)
    tensors = tensors_of(adapted("qwen3", 1))
    wrong = hashes(tensors) | {next(iter(tensors)): "0" * 64}
    with pytest.raises(Failed, match="400: .*expected_checksums is 0000.*Nothing has changed"):
        client.load_from_tensors([serialize(tensors)], expected_checksums=wrong)
    # miles unloads before it loads, so no request may name the adapter now.
    with refusal(400):
        engine.post("/generate", dict(input_ids=[5], lora_path=NAME))


@pytest.fixture
def process():
    made = trainer(dict(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1"))
    yield made
    made.kill()


def sent_shapes():
    """miles sends bfloat16; the values are coded by name and place."""
    tensors = get_peft_model_state_dict(adapted("qwen3", 1))
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def digest(variant, shapes, config=CONFIG):
    expected = refit.AdapterDigest(config, "float32")
    for name, shape in shapes.items():
        expected.add(name, coded(variant, name, shape))
    return expected.value()


@pytest.mark.parametrize("upsert", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_disaggregated_the_adapter_is_broadcast_tensor_by_tensor(engines, process, ranks, upsert):
    """Between begin_weight_update and end_weight_update. Older versions unload first, later ones send upsert."""
    engine = engines("qwen3", ranks, "cpu", *LORA_FLAGS, "--group-timeout", 60)
    client, shapes = MilesEngine(engine.url), sent_shapes()
    process("start", device="cpu", shapes=[[name, list(shape)] for name, shape in shapes.items()])
    group = Group("t" + "a" * ranks, dict(a=engine), [process], shapes, name=GROUP)
    client.destroy_weights_update_group(GROUP)
    group.join()
    names = list(shapes)
    is_loaded = False
    for variant in (1, 2, 1):
        client.pause_generation("retract")
        client.flush_cache()
        assert client.make_request("begin_weight_update", dict(selector="all"))["success"] is True
        if is_loaded and not upsert:
            client.unload_lora_adapter()
        group.prepare(variant, names)
        asked = Beside(lambda: client.load_from_distributed(names, list(shapes.values()), upsert=upsert))
        process("send", group=GROUP)
        reply = asked.result()
        is_loaded = True
        assert reply["success"] is True
        assert reply["adapter"]["digest"] == digest(variant, shapes)
        client.make_request("update_weight_version", dict(new_version=str(variant)))
        assert client.make_request("end_weight_update")["success"] is True
        client.continue_generation()
        made = engine.post("/generate", dict(input_ids=[5, 6], lora_path=NAME, sampling_params=dict(max_new_tokens=1)))
        assert made["meta_info"]["lora"]["digest"] == digest(variant, shapes)
    with pytest.raises(Refused):
        engine.post("/generate", dict(input_ids=[5], lora_path="another"))
    client.unload_lora_adapter()
    process.kill()
    client.destroy_weights_update_group(GROUP)


# The names and shapes of PEFT for fused experts, embeddings and heads, in whose broadcasts modules lie between each
# other's elements.
INTERLEAVED = {
    "experts": dict(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    ),
    "embeddings": dict(r=8, lora_alpha=8, target_modules=["embed_tokens", "lm_head", "q_proj"]),
}


@pytest.mark.parametrize("case", INTERLEAVED)
@pytest.mark.parametrize("ranks", [1, 2])
def test_disaggregated_fused_experts_and_embeddings_are_broadcast(engines, process, ranks, case):
    flags = ["--lora-target-modules", "all", "--group-timeout", 60]
    engine = engines("qwen3-moe", ranks, "cpu", *LORA_FLAGS, *flags)
    client, fields = MilesEngine(engine.url), INTERLEAVED[case]
    tensors = get_peft_model_state_dict(peft_model(base_of(GOLDENS / "qwen3-moe"), 1, **fields))
    # PEFT's copies of the frozen embeddings are no halves of an adapter.
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if "base_layer.weight" not in name}
    config = dict(peft_type="LORA", **fields)
    process("start", device="cpu", shapes=[[name, list(shape)] for name, shape in shapes.items()])
    group = Group("t" + "a" * ranks, dict(a=engine), [process], shapes, name=GROUP)
    client.destroy_weights_update_group(GROUP)
    group.join()
    names = list(shapes)
    for variant in (1, 2):
        sums = hashes({name: coded(variant, name, shape) for name, shape in shapes.items()})
        for change, status in [({names[-1]: "0" * 64}, 400), ({}, 200)]:
            group.prepare(variant, names)
            body = dict(lora_name=NAME, config_dict=config, upsert=True, expected_checksums=sums | change)
            body = group.body(names, "each", {}, **body)
            asked = Beside(lambda body=body: client.raw("POST", "/load_lora_adapter_from_distributed", body))
            process("send", group=GROUP)
            found, reply = asked.result()
            assert found == status, reply
            reply = json.loads(reply)
        assert reply["checksums_verified"] is True
        assert reply["adapter"]["digest"] == digest(variant, shapes, config)
        # The same tensors by handles.
        handles = serialize({name: coded(variant, name, shape) for name, shape in shapes.items()})
        with contextlib.suppress(Failed):
            client.make_request("unload_lora_adapter", dict(lora_name="handles"))
        body = dict(lora_name="handles", config_dict=config, serialized_named_tensors=[handles])
        made = client.make_request("load_lora_adapter_from_tensors", body)
        assert made["adapter"]["digest"] == reply["adapter"]["digest"]
    for name in (NAME, "handles"):
        client.make_request("unload_lora_adapter", dict(lora_name=name))
    process.kill()
    client.destroy_weights_update_group(GROUP)


def test_a_rollout_names_the_adapter_in_every_request(engines):
    """The session server adds lora_path to OpenAI's requests of agents."""
    engine = engines("qwen3", 1, "cpu", *LORA_FLAGS)
    client, model = MilesEngine(engine.url), adapted("qwen3", 1)
    client.load_from_tensors([serialize(tensors_of(model))])
    made = [
        engine.post(
            "/v1/completions", dict(model="default", prompt=[5, 6, 7], max_tokens=2, logprobs=0, temperature=0, **named)
        )
        for named in (dict(lora_path=NAME), {})
    ]
    logprobs = [reply["choices"][0]["logprobs"]["token_logprobs"] for reply in made]
    assert logprobs[0] != logprobs[1]
    client.unload_lora_adapter()
