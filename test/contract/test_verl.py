"""verl's HTTP requests from a worker on the engine's GPU, which finds the server through a Ray shim.

The transports of its checkpoint engines end in that worker.
"""

import base64
import gc
import json
import os
import time
import urllib.error
import urllib.request

import peft
import pytest
import torch

from engines import DEVICES, Beside
from peft_replies import FLAGS as LORA_FLAGS
from peft_replies import adapted, check
from tensor_process import shared_files
from tensors import LocalSerializedTensor, dumps, serialize

NAIVE = pytest.mark.row(7, "verl / naive SGLang")
DISAGGREGATED = pytest.mark.row(8, "verl / disaggregated")
LORA = pytest.mark.row(10, "verl / LoRA adapter")


class Adapter:
    """verl's HTTP client: 60 s, and three attempts after timeouts and refused connections.

    It raises a status other than success at once, reads an empty body as {}, and ignores `success`.
    """

    def __init__(self, url, timeout_s=60):
        self.url, self.timeout_s = url, timeout_s

    def request(self, endpoint, payload=None, method="POST"):
        data = None if method == "GET" else json.dumps(payload or {}).encode()
        for attempt in range(3):
            try:
                request = urllib.request.Request(
                    f"{self.url}/{endpoint}", data, {"content-type": "application/json"}, method=method
                )
                with urllib.request.urlopen(request, timeout=self.timeout_s) as reply:
                    body = reply.read()
                    return (
                        json.loads(body or b"{}")
                        if "json" in reply.headers.get("content-type", "json")
                        else body.decode()
                    )
            except urllib.error.HTTPError as error:
                raise RuntimeError(f"{error.code}: {error.read().decode()[:2000]}") from None
            except TimeoutError:
                if attempt == 2:
                    raise
                time.sleep(0.1 * 2**attempt)

    def flush_cache(self):
        for _ in range(12):
            try:
                return self.request("flush_cache", method="GET")
            except RuntimeError:
                time.sleep(0.2)
        return None


class ServerAdapter:
    """The calls of verl's worker around an update. `resume`: it has released the engine's memory before."""

    def __init__(self, engine, device):
        self.engine, self.device, self.http = engine, device, Adapter(engine.url)
        self.handles = []

    def release(self, tags=("kv_cache", "weights")):
        return self.http.request("release_memory_occupation", dict(tags=list(tags)))

    def resume(self, *tags):
        return self.http.request("resume_memory_occupation", dict(tags=list(tags)))

    def entries(self, named):
        """A handle of every tensor for each tensor-parallel rank, and the whole list once for each rank."""
        ranks = self.engine.ranks
        self.handles = [(name, [tensor.to(self.device).clone() for _ in range(ranks)]) for name, tensor in named]
        text = serialize([(name, LocalSerializedTensor([dumps(own) for own in each])) for name, each in self.handles])
        return [text] * ranks

    def bucket(self, named, **fields):
        reply = self.http.request(
            "update_weights_from_tensor",
            dict(serialized_named_tensors=self.entries(named), load_format=None, flush_cache=True, **fields),
        )
        self.handles = []
        gc.collect()
        if self.device != "cpu":
            torch.cuda.ipc_collect()
        return reply

    def update(self, named, limit=16 << 10):
        bucket, size = [], 0
        for name, tensor in named:
            if bucket and size + tensor.nbytes > limit:
                self.bucket(bucket)
                bucket, size = [], 0
            bucket.append((name, tensor))
            size += tensor.nbytes
        self.bucket(bucket)
        assert "Cache flushed" in self.http.flush_cache()


def served(engines, ranks, device):
    env = {"REFIT_CUDA_SHARE_CARD": "1"} if device == "cuda" and ranks > torch.cuda.device_count() else None
    return engines("qwen3-moe", ranks, device, env=env)


@NAIVE
@DISAGGREGATED
@pytest.mark.brings("memory")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_buckets_of_handles_between_the_resume_of_weights_and_of_the_cache(engines, ranks, device):
    """The disaggregated backends look the same to the engine: the worker on its GPU has received the weights."""
    engine = served(engines, ranks, device)
    worker = ServerAdapter(engine, "cpu" if device == "cpu" else "cuda:0")
    before = set(shared_files(os.getpid()))
    held = torch.cuda.memory_allocated() if device == "cuda" else 0
    for variant in (1, 2, 1):
        worker.release()
        worker.resume("weights")
        worker.update(engine.tensors(variant))
        worker.resume("kv_cache")
        engine.holds(variant)
        assert len(engine.tokens()["output_ids"]) == 4
    gc.collect()
    assert set(shared_files(os.getpid())) <= before
    if device == "cuda":
        torch.cuda.empty_cache()
        assert torch.cuda.memory_allocated() <= held, "the engine has given the trainer's memory back"


@DISAGGREGATED
@pytest.mark.brings("memory")
def test_only_the_cache_is_released_and_aborted_requests_go_on_from_their_tokens(engines):
    """Abort all, release the cache, update, resume the cache, go on from the prefix."""
    engine = served(engines, 1, "cpu")
    worker = ServerAdapter(engine, "cpu")
    running = Beside(lambda: engine.tokens(480))
    time.sleep(0.2)
    worker.http.request("abort_request", dict(rid="", abort_all=True))
    partial = running.result()
    assert partial["meta_info"]["finish_reason"]["type"] in ("abort", "length")
    worker.release(["kv_cache"])
    worker.update(engine.tensors(3))
    worker.resume("kv_cache")
    engine.holds(3)
    body = dict(
        input_ids=[5, 6, 7, *partial["output_ids"]][:500], sampling_params=dict(max_new_tokens=4), return_logprob=True
    )
    assert len(engine.post("/generate", body)["meta_info"]["output_token_logprobs"]) >= 1


@NAIVE
@pytest.mark.brings("memory")
def test_a_bucket_that_is_sent_again_changes_nothing(engines):
    """After a timeout verl posts the same body again.

    It joins the first one while that runs, and later is a new update.
    """
    engine = served(engines, 2, "cpu")
    worker = ServerAdapter(engine, "cpu")
    worker.update(engine.tensors(1))
    entries = worker.entries(engine.tensors(2))
    body = dict(serialized_named_tensors=entries, load_format=None, flush_cache=True)
    first, second = (Beside(lambda: worker.http.request("update_weights_from_tensor", body)) for _ in range(2))
    # After the end of the first one its handles are used up: the second is refused and changes nothing.
    outcomes = []
    for call in (first, second):
        try:
            outcomes.append(call.result()["success"])
        except RuntimeError as error:
            outcomes.append(str(error)[:3])
    assert outcomes.count(True) >= 1 and set(outcomes) <= {True, "400"}, outcomes
    engine.holds(2)
    assert engine.get("/server_info")["weights"] == "current"


@NAIVE
def test_a_wrong_request_is_an_error_status(engines):
    engine = served(engines, 1, "cpu")
    worker = ServerAdapter(engine, "cpu")
    worker.update(engine.tensors(1))
    with pytest.raises(RuntimeError, match="400: .*no_such"):
        worker.bucket([("model.no_such.weight", torch.zeros(4, dtype=torch.bfloat16))])
    with pytest.raises(RuntimeError, match="400: .*shape"):
        worker.bucket([("model.norm.weight", torch.zeros(3, dtype=torch.bfloat16))])
    engine.holds(1)


@LORA
@pytest.mark.brings("memory")
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_base_is_sent_once_and_then_only_adapters(engines, ranks):
    """The worker asks for the list of models, unloads, and loads one pickle for each rank (engine_workers.py)."""
    name = "verl_actor_lora_name"
    engine = engines("qwen3", ranks, "cpu", *LORA_FLAGS, "--max-loras-per-batch", 2)
    worker = ServerAdapter(engine, "cpu")
    models = [adapted("qwen3", seed) for seed in (1, 2)]
    whole = models[0].get_base_model().state_dict()
    # The SGLang path strips what PEFT adds to names of the base, and the head is tied.
    worker.update(
        [(key.replace(".base_layer.", "."), value) for key, value in whole.items() if "lora_" not in key],
        limit=1 << 20,
    )
    with pytest.raises(RuntimeError, match="400: .*never been loaded.*verl_actor_lora_name"):
        worker.http.request("generate", dict(input_ids=[5], lora_path=name))
    for model in models:
        if any(entry["id"] == name for entry in worker.http.request("v1/models", method="GET")["data"]):
            worker.http.request("unload_lora_adapter", dict(lora_name=name))
        tensors = {key: value.clone() for key, value in peft.get_peft_model_state_dict(model).items()}
        config = {
            key: sorted(value) if isinstance(value, set) else value
            for key, value in model.peft_config["default"].to_dict().items()
        }
        payload = base64.b64encode(dumps(tensors)).decode()
        reply = worker.http.request(
            "load_lora_adapter_from_tensors",
            dict(lora_name=name, config_dict=config, serialized_named_tensors=[payload] * ranks),
        )
        assert reply["success"] and reply["loaded_adapters"] == {name: "__tensor__"}
        del tensors
        assert "Cache flushed" in worker.http.flush_cache()
        check(engine, name, model)


@LORA
@pytest.mark.refused("on a server without --enable-lora")
def test_adapters_are_refused_by_a_server_without_them(engines):
    engine = served(engines, 1, "cpu")
    worker = ServerAdapter(engine, "cpu")
    worker.update(engine.tensors(1))
    payload = base64.b64encode(dumps({"base_model.model.model.norm.lora_A.weight": torch.zeros(2, 2)})).decode()
    for body in [dict(serialized_named_tensors=[payload]), dict(serialized_tensors=payload)]:
        with pytest.raises(RuntimeError, match="400: .*--enable-lora"):
            worker.http.request(
                "load_lora_adapter_from_tensors", dict(lora_name="verl_actor_lora_name", config_dict=dict(r=2), **body)
            )
    with pytest.raises(RuntimeError, match="400:"):
        worker.http.request("unload_lora_adapter", dict(lora_name="verl_actor_lora_name"))
    engine.holds(1)
