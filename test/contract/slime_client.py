"""slime's client of an SGLang engine: its requests, their order, and the parts of replies that it reads."""

import base64
import concurrent.futures
import gc
import json
import time
import urllib.error
import urllib.request

import torch
from tensors import bucket, serialize
from torch.multiprocessing.reductions import reduce_tensor


class Failed(Exception):
    """A status other than success. slime looks at nothing else."""


class SlimeEngine:
    """The requests to one engine. Those to several engines run at the same time, as with Ray actors."""

    def __init__(self, url):
        self.url = url

    def raw(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as reply:
                return reply.status, reply.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def make_request(self, endpoint, payload=None):
        """One attempt. Raises a status other than success, and parses the body of a success as JSON."""
        status, body = self.raw("POST", f"/{endpoint}", payload or {})
        if status >= 400:
            raise Failed(f"{endpoint}: {status}: {body.decode()[:600]}")
        return json.loads(body)

    def pause_generation(self):
        assert self.raw("POST", "/pause_generation", {})[0] == 200

    def continue_generation(self):
        assert self.raw("POST", "/continue_generation", {})[0] == 200

    def flush_cache(self):
        for _ in range(60):
            if self.raw("GET", "/flush_cache")[0] == 200:
                return
            time.sleep(1)
        raise TimeoutError("the cache is not flushed")

    def get_weight_version(self):
        status, body = self.raw("GET", "/get_weight_version")
        assert status == 200
        return json.loads(body)["weight_version"]

    def health_generate(self):
        return self.raw("GET", "/health_generate")[0] == 200

    def init_weights_update_group(self, master_address, master_port, rank_offset, world_size, group_name, backend):
        return self.make_request(
            "init_weights_update_group",
            dict(
                master_address=master_address,
                master_port=master_port,
                rank_offset=rank_offset,
                world_size=world_size,
                group_name=group_name,
                backend=backend,
            ),
        )

    def destroy_weights_update_group(self, group_name):
        try:
            return self.make_request("destroy_weights_update_group", dict(group_name=group_name))
        except Failed:
            # A new engine has none.
            return None

    def update_weights_from_distributed(self, names, dtypes, shapes, group_name, weight_version, load_format=None):
        payload = dict(
            names=names,
            dtypes=[str(dtype).replace("torch.", "") for dtype in dtypes],
            shapes=shapes,
            group_name=group_name,
            flush_cache=False,
            weight_version=weight_version,
        )
        return self.make_request(
            "update_weights_from_distributed", {**payload, **(dict(load_format=load_format) if load_format else {})}
        )

    def update_weights_from_tensor(self, serialized_named_tensors, weight_version, load_format="flattened_bucket"):
        return self.make_request(
            "update_weights_from_tensor",
            dict(
                serialized_named_tensors=serialized_named_tensors,
                load_format=load_format,
                flush_cache=False,
                weight_version=weight_version,
            ),
        )

    def update_weights_from_disk(self, model_path, weight_version):
        return self.make_request(
            "update_weights_from_disk", dict(model_path=str(model_path), weight_version=weight_version)
        )

    def pull_weights(self, local_checkpoint_dir, source_dir, target_version):
        return self.make_request(
            "pull_weights",
            dict(
                local_checkpoint_dir=str(local_checkpoint_dir),
                source_dir=str(source_dir),
                target_version=target_version,
            ),
        )

    def post_process_weights(self, restore, process):
        return self.make_request(
            "post_process_weights", dict(restore_weights_before_load=restore, post_process_quantization=process)
        )

    def release_memory_occupation(self):
        self.flush_cache()
        return self.make_request("release_memory_occupation")

    def resume_memory_occupation(self, tags=None):
        return self.make_request("resume_memory_occupation", dict(tags=tags))

    def check_weights(self, action):
        return self.make_request("weights_checker", dict(action=action))

    def abort_all(self):
        """The end of a rollout: polls the load until nothing runs."""
        assert self.raw("POST", "/abort_request", dict(abort_all=True))[0] == 200
        for _ in range(20):
            status, body = self.raw("GET", "/v1/loads?include=core")
            assert status == 200
            loads = json.loads(body)["loads"]
            if (
                sum(
                    load["num_reqs"] if "num_reqs" in load else load["num_running_reqs"] + load["num_waiting_reqs"]
                    for load in loads
                )
                <= 0
            ):
                return
            time.sleep(0.1)
        raise TimeoutError("requests run on")

    def generate(self, ids, count=4, **more):
        sampling = dict(
            temperature=1.0,
            top_p=1.0,
            top_k=-1,
            max_new_tokens=count,
            stop=None,
            stop_token_ids=None,
            skip_special_tokens=False,
            no_stop_trim=True,
            spaces_between_special_tokens=False,
        )
        return self.make_request(
            "generate",
            dict(input_ids=ids, sampling_params={**sampling, **more.pop("sampling", {})}, return_logprob=True, **more),
        )


class SlimeEngines:
    """Runs all calls at the same time."""

    def __init__(self, *urls):
        self.each = [SlimeEngine(url) for url in urls]
        self.pool = concurrent.futures.ThreadPoolExecutor(2 * len(urls))

    def begin(self, method, *arguments, **named):
        return [self.pool.submit(getattr(engine, method), *arguments, **named) for engine in self.each]

    def all(self, method, *arguments, **named):
        return [future.result() for future in self.begin(method, *arguments, **named)]


def serve(engine, client, variant, frame=True):
    """A colocated update between pause and resume."""
    if frame:
        client.pause_generation()
        client.flush_cache()
    named = engine.tensors(variant)
    for at in range(0, len(named), 8):
        client.update_weights_from_tensor([serialize(bucket(named[at : at + 8]))] * engine.ranks, str(variant))
    if frame:
        client.continue_generation()
    engine.holds(variant)


class Colocated:
    """The training ranks of an engine's GPUs: each makes a bucket, and the first sends all.

    Handles name a GPU by its UUID.
    """

    def __init__(self, engine, device):
        self.engine, self.device = engine, device

    def entry(self, named):
        flat = bucket([(name, tensor.to(self.device)) for name, tensor in named])
        flat["flattened_tensor"] = flat["flattened_tensor"].to(self.device)
        return flat, patched(flat) if self.device != "cpu" else serialize(flat)

    def send(self, client, entries, version):
        kept = [self.entry(named) for named in entries]
        reply = client.update_weights_from_tensor([text for _, text in kept], version)
        assert reply["success"] is True
        del kept
        gc.collect()
        if self.device != "cpu":
            torch.cuda.ipc_collect()


def patched(flat):
    """SGLang's patch of torch's reductions: the UUID replaces the GPU's index."""
    import io
    from multiprocessing.reduction import ForkingPickler

    class Pickler(ForkingPickler):
        def reducer_override(self, obj):
            if isinstance(obj, torch.Tensor) and obj.is_cuda:
                function, arguments = reduce_tensor(obj)
                uuid = str(torch.cuda.get_device_properties(obj.device).uuid)
                return function, (*arguments[:6], uuid, *arguments[7:])
            return NotImplemented

    buffer = io.BytesIO()
    Pickler(buffer).dump(flat)
    return base64.b64encode(buffer.getvalue()).decode()
