"""AReaL over SGLang's routes and over those of its vLLM server, by process groups and from disk."""

import base64
import http.client
import json
import shutil

import pytest
import torch
from areal_trainer import NAME, Trainer, buckets
from distributed_group import trainer
from engines import GOLDENS, Beside, Refused, refusal, settled
from peft_adapters import ATTENTION, MLP, get_peft_model_state_dict
from peft_replies import FLAGS as LORA_FLAGS
from peft_replies import adapted, check
from python_client import refit
from tensors import coded

SGLANG = pytest.mark.row(17, "AReaL / SGLang NCCL")
SGLANG_DISK = pytest.mark.row(18, "AReaL / SGLang disk")
VLLM = pytest.mark.row(19, "AReaL / vLLM NCCL")
VLLM_DISK = pytest.mark.row(20, "AReaL / vLLM disk")
WAYS = ["gloo", pytest.param("nccl", marks=pytest.mark.cards(2))]


@pytest.fixture
def process():
    made = trainer({"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"})
    yield made
    made.kill()


def served(engines, backend, which="a", *flags):
    """The trainer uses GPU 0."""
    env = {"CUDA_VISIBLE_DEVICES": "1"} if backend == "nccl" else None
    return engines(
        "qwen3", 1, "cuda" if backend == "nccl" else "cpu", "--group-timeout", 60, *flags, which=which, env=env
    )


@SGLANG
@pytest.mark.brings("group")
@pytest.mark.parametrize("backend", WAYS)
def test_sglang_weights_go_to_a_to_b_and_back_to_a(engines, process, backend):
    engine = served(engines, backend)
    assert engine.request("GET", "/health", {}), "with a body, as aiohttp sends it"
    trained = Trainer(engine, process, backend)
    engine.spoil()
    assert len(buckets(engine)) > 3
    for variant in [1, 2, 1]:
        trained.update(variant)
        engine.holds(variant)
    # AReaL's trainers end without leaving. (With NCCL torch would wait until the engine leaves the group.)
    process.kill()
    engine.post("/destroy_weights_update_group", dict(group_name=NAME))


@SGLANG
@pytest.mark.brings("group")
def test_sglang_a_group_for_each_stage_is_taken(engines, process):
    """If the trainer has several pipeline stages, the same tensors go through each stage's group in turn."""
    engine = served(engines, "gloo")
    names = ["update_weight_group_0", "update_weight_group_1"]
    trained = Trainer(engine, process, "gloo", names=names)
    for variant in [1, 2]:
        trained.update(variant)
        engine.holds(variant)
    for name in names:
        process("leave", group=name)
        engine.post("/destroy_weights_update_group", dict(group_name=name))


def announced(engine, body):
    """A request that is sent in the order of the calls, without a wait for its reply."""
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=60)
    connection.request(
        "POST", "/update_weights_from_distributed", json.dumps(body), {"content-type": "application/json"}
    )
    engine.get("/health")
    return connection


@SGLANG
@pytest.mark.brings("group")
def test_sglang_a_bucket_may_be_announced_before_the_last_one_has_arrived(engines, process):
    engine = served(engines, "gloo")
    trained = Trainer(engine, process, "gloo")
    engine.spoil()
    trained.pause()
    asked = [announced(engine, trained.body(names, NAME) | dict(abort_all_requests=True)) for names in buckets(engine)]
    for names, connection in zip(buckets(engine), asked):
        process("prepare", variant=3, names=names)
        process("send", group=NAME)
        reply = connection.getresponse()
        assert reply.status == 200, reply.read().decode()[:500]
        connection.close()
    trained.resume()
    engine.holds(3)
    # AReaL's trainers end without leaving. (With NCCL torch would wait until the engine leaves the group.)
    process.kill()
    engine.post("/destroy_weights_update_group", dict(group_name=NAME))


@SGLANG
@pytest.mark.brings("group")
def test_sglang_the_pause_ends_requests_with_their_tokens_and_the_update_flushes(engines, process):
    engine = served(engines, "gloo")
    trained = Trainer(engine, process, "gloo")
    trained.update(1)
    prompt = list(range(3, 80))
    body = dict(
        input_ids=prompt, sampling_params=dict(max_new_tokens=400, ignore_eos=True), return_logprob=True, stream=False
    )
    # All requests may end before the pause.
    for _ in range(10):
        running = in_flight(engine, "/generate", body)
        trained.update(2)
        metas = [one.result()["meta_info"] for one in running]
        aborted = [meta for meta in metas if meta["finish_reason"]["type"] == "abort"]
        if aborted:
            break
    assert aborted and all(meta["completion_tokens"] == len(meta["output_token_logprobs"]) < 400 for meta in aborted)
    again = engine.post("/generate", dict(input_ids=prompt, sampling_params=dict(max_new_tokens=1)))
    assert again["meta_info"]["cached_tokens"] == 0, "flush_cache is not sent, and its default holds"
    # AReaL's trainers end without leaving. (With NCCL torch would wait until the engine leaves the group.)
    process.kill()
    engine.post("/destroy_weights_update_group", dict(group_name=NAME))


def in_flight(engine, path, body, count=12):
    """Enough requests that some still run at the next call."""
    running = [Beside(lambda: engine.post(path, body)) for _ in range(count)]
    settled(
        lambda: engine.metric("refit:num_requests_running"), lambda found: found > 0 or all(one.done for one in running)
    )
    return running


def checkpoint(folder, engine, variant):
    import safetensors.torch

    folder.mkdir(parents=True)
    shutil.copy(GOLDENS / "qwen3/config.json", folder)
    safetensors.torch.save_file(dict(engine.tensors(variant)), folder / "model.safetensors")
    return folder


@pytest.mark.brings("files")
@pytest.mark.parametrize("mode", [pytest.param("sglang", marks=SGLANG_DISK), pytest.param("vllm", marks=VLLM_DISK)])
def test_a_checkpoint_that_is_requested_again_is_loaded_again(engines, tmp_path_factory, mode):
    root = tmp_path_factory.mktemp("areal")
    engine = engines("qwen3", 1, "cpu", "--model-root", root)
    path = "/update_weights_from_disk" if mode == "sglang" else "/areal_update_weights"
    fields = dict(abort_all_requests=True) if mode == "sglang" else {}
    for version, variant in enumerate([1, 2]):
        folder = checkpoint(root / f"weight_update_v{version}", engine, variant)
        engine.post("/pause_generation" if mode == "sglang" else "/areal_pause_generation", {})
        body = dict(model_path=str(folder)) | fields
        replies = [one.result() for one in [Beside(lambda: engine.post(path, body)) for _ in range(3)]] + [
            engine.post(path, body)
        ]
        assert all(reply["success"] is True and isinstance(reply["message"], str) for reply in replies)
        engine.post("/continue_generation" if mode == "sglang" else "/areal_continue_generation", {})
        engine.holds(variant)
        shutil.rmtree(folder)
    with refusal(400) as absent:
        engine.post(path, dict(model_path=str(root / "weight_update_v9")) | fields)
    assert json.loads(absent["body"])["success"] is False and "weight_update_v9" in absent["body"]
    engine.holds(2)


@pytest.mark.parametrize(
    "path",
    [pytest.param("/load_lora_adapter", marks=SGLANG_DISK), pytest.param("/v1/load_lora_adapter", marks=VLLM_DISK)],
)
def test_adapters_on_disk_have_a_name_for_every_version(engines, shared_root, path):
    """SGLang: the version before the kept ones is unloaded, whether or not it was loaded. vLLM: never unloaded."""
    engine = engines("qwen3", 1, "cpu", *LORA_FLAGS, "--model-root", shared_root)
    prefix = f"policy{path.count('/')}"
    for version in (1, 2, 3):
        model = adapted("qwen3", version)
        folder = shared_root / f"{prefix}-v{version}"
        model.save_pretrained(folder)
        engine.post(path, dict(lora_name=f"{prefix}-v{version}", lora_path=str(folder)))
        if path == "/load_lora_adapter":
            try:
                engine.post("/unload_lora_adapter", dict(lora_name=f"{prefix}-v{version - 2}"))
            except Refused as error:
                assert error.status == 400 and version < 3
        check(engine, f"{prefix}-v{version}", model)
    names = {entry["id"] for entry in engine.get("/v1/models")["data"] if entry["id"].startswith(prefix)}
    kept = [2, 3] if path == "/load_lora_adapter" else [1, 2, 3]
    assert names == {f"{prefix}-v{version}" for version in kept}


@VLLM
@pytest.mark.brings("group")
@pytest.mark.parametrize("backend", WAYS)
def test_vllm_weights_go_to_a_to_b_and_back_to_a(engines, process, backend):
    """Two requests for each bucket: the server keeps the announcement of the first until the second."""
    engine = served(engines, backend)
    trained = Trainer(engine, process, backend, mode="vllm")
    engine.spoil()
    for variant in [1, 2, 1]:
        trained.update(variant)
        engine.holds(variant)
    with refusal(409) as nothing:
        engine.post("/areal_update_weights_xccl", {})
    assert "/areal_set_update_weight_meta" in nothing["body"], "and waits for nothing that nobody sends"
    # AReaL's trainers end without leaving. (With NCCL torch would wait until the engine leaves the group.)
    process.kill()


@VLLM
def test_vllm_completions_wait_while_paused_and_return_token_ids(engines, process):
    engine = served(engines, "gloo")
    body = dict(
        prompt=[5, 6, 7],
        max_tokens=400,
        logprobs=0,
        return_tokens_as_token_ids=True,
        temperature=1.0,
        top_p=1.0,
        ignore_eos=True,
        stream=False,
        use_beam_search=False,
    )
    # All requests may end before the pause.
    for _ in range(10):
        running = in_flight(engine, "/v1/completions", body)
        assert engine.post("/areal_pause_generation", {}) == {
            "success": True,
            "message": "Generation paused and all requests aborted",
        }
        choice = next(
            (
                choice
                for choice in (one.result()["choices"][0] for one in running)
                if choice["finish_reason"] == "abort"
            ),
            None,
        )
        if choice is not None:
            break
        engine.post("/areal_continue_generation", {})
    tokens = [int(token.split(":")[1]) for token in choice["logprobs"]["tokens"]]
    assert len(tokens) == len(choice["logprobs"]["token_logprobs"]) < 400
    # The client's prompt now includes the tokens that it has.
    waiting = Beside(lambda: engine.post("/v1/completions", body | dict(prompt=[5, 6, 7, *tokens], max_tokens=4)))
    settled(lambda: engine.metric("refit:num_requests_waiting"), lambda count: count > 0)
    assert not waiting.done
    assert engine.post("/areal_continue_generation", {}) == {"success": True, "message": "Generation continued"}
    assert waiting.result()["choices"][0]["finish_reason"] == "length"


@VLLM
@pytest.mark.refused("LoRA adapters on a server without --enable-lora")
def test_vllm_adapters_are_received_dropped_and_refused(engines, process):
    engine = served(engines, "gloo")
    trained = Trainer(engine, process, "gloo", mode="vllm")
    trained.update(1)
    names = list(engine.shapes)[:3]
    adapter = dict(
        lora_name="policy-v1",
        lora_int_id=1,
        lora_target_modules=["q_proj"],
        lora_rank=8,
        lora_alpha=16,
        lora_bias="none",
        base_model_name="base",
    )
    process("prepare", variant=2, names=names)
    asked = Beside(lambda: engine.post("/areal_set_update_weight_meta_lora", trained.body(names, NAME) | adapter))
    process("send", group=NAME)
    with refusal(400) as found:
        asked.result()
    assert "policy-v1" in found["body"] and "stays in step" in found["body"]
    with refusal(400):
        engine.post("/areal_update_weights_lora_xccl", trained.body(names, NAME) | adapter)
    engine.holds(1)
    trained.update(2)
    engine.holds(2)
    # AReaL's trainers end without leaving. (With NCCL torch would wait until the engine leaves the group.)
    process.kill()


@VLLM
@pytest.mark.brings("group")
@pytest.mark.parametrize("stages", [1, 2])
def test_vllm_adapters_come_from_every_pipeline_stage(engines, process, stages):
    """A group for each stage, each with its layers. The name of the version before is refused from then on."""
    engine = served(engines, "gloo", "a", *LORA_FLAGS)
    tensors = get_peft_model_state_dict(adapted("qwen3", 1))
    shapes = {
        name.replace(".weight", ".default.weight"): tuple(tensor.shape) for name, tensor in tensors.items()
    }
    groups = [f"{NAME}_{stage}" for stage in range(stages)]
    trained = Trainer(engine, process, "gloo", mode="vllm", names=groups)
    process("start", device="cpu", shapes=[[name, list(shape)] for name, shape in shapes.items()])
    for stage, group in enumerate(groups):
        engine.post("/destroy_weights_update_group", dict(group_name=group))
        trained.join(group, {"pp_rank": stage} if stages > 1 else {})
    fields = dict(lora_int_id=1, lora_target_modules=ATTENTION + MLP, lora_rank=8, lora_alpha=16, lora_bias="none")
    for version in (1, 2, 3):
        name = f"policy-v{version}"
        for stage, group in enumerate(groups):
            names = [one for one in shapes if f".layers.{stage}." in one or stages == 1]
            body = dict(
                names=names,
                dtypes=["bfloat16"] * len(names),
                shapes=[list(shapes[one]) for one in names],
                group_name=group,
                lora_name=name,
                base_model_name="base",
                **fields,
            )
            process("prepare", variant=version, names=names)
            assert engine.post("/areal_set_update_weight_meta_lora", body)["success"] is True
            asked = Beside(lambda body=body: engine.post("/areal_update_weights_lora_xccl", body))
            process("send", group=group)
            assert asked.result()["success"] is True
        expected = refit.AdapterDigest(dict(r=8, lora_alpha=16), "float32")
        for one, shape in shapes.items():
            expected.add(one.replace(".default", ""), coded(version, one, shape))
        body = dict(model=name, prompt=[5, 6], max_tokens=1, temperature=0)
        assert engine.post("/v1/completions", body)["model"] == name
        assert [one["digest"] for one in engine.get("/adapters")["adapters"]] == [expected.value()]
        if version > 1:
            with refusal(404):
                engine.post("/v1/completions", body | dict(model=f"policy-v{version - 1}"))
    engine.post("/v1/unload_lora_adapter", dict(lora_name="policy-v3"))
    process.kill()


@VLLM
def test_vllm_a_refused_update_is_received_first(engines, process):
    engine = served(engines, "gloo")
    trained = Trainer(engine, process, "gloo", mode="vllm")
    trained.update(1)
    names = list(engine.shapes)[:3]
    for wrong in [dict(names=["nobody", *names[1:]]), dict(dtypes=["bfloat16", 7, "bfloat16"])]:
        process("prepare", variant=2, names=names)
        asked = Beside(lambda: trained.requests(trained.body(names, NAME) | wrong))
        process.begin("send", group=NAME)
        with refusal(400) as found:
            asked.result()
        if "dtypes" in wrong:
            assert "aborted" in found["body"], "nobody can tell how many bytes come"
            process.kill()
        else:
            process.end()
            assert "nobody" in found["body"] and "stays in step" in found["body"]
    engine.holds(1)
    with refusal(404):
        engine.post("/areal_set_update_weight_meta", trained.body(names, "another"))


@VLLM
@pytest.mark.brings("body")
def test_vllm_tensors_of_the_colocated_mode_are_in_the_body(engines):
    """bfloat16 travels as float32 in base64 under its own dtype. A chunk is one update."""
    engine = engines("qwen3")
    engine.spoil()

    def entry(tensor, floats=True):
        raw = (tensor.float() if floats else tensor.view(dtype=torch.int16)).numpy().tobytes()
        return dict(
            type="tensor", data=base64.b64encode(raw).decode(), shape=list(tensor.shape), dtype="torch.bfloat16"
        )

    engine.post("/areal_pause_generation", {})
    for chunk in buckets(engine):
        weights = {name: entry(coded(5, name, engine.shapes[name])) for name in chunk}
        assert engine.post("/areal_update_weights_tensor", dict(names=chunk, weights=weights))["success"] is True
    engine.post("/areal_continue_generation", {})
    engine.holds(5)
    names = list(engine.shapes)
    good = {name: entry(coded(6, name, engine.shapes[name]), floats=False) for name in names}
    short = {names[1]: good[names[1]] | dict(data="AAAA")}
    for weights, said in [
        (good | short, names[1]),
        ({names[0]: good[names[0]]}, "names"),
        (good | {names[2]: good[names[2]] | dict(data="%%%%")}, "base64"),
        (good | {names[0]: good[names[0]] | dict(data=None)}, "meta"),
    ]:
        with refusal(400) as found:
            engine.post("/areal_update_weights_tensor", dict(names=names, weights=weights))
        assert said in found["body"]
    engine.holds(5)
    assert engine.post("/areal_update_weights_tensor", dict(names=names, weights=good))["success"] is True
    engine.holds(6)
