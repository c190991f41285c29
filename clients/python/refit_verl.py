"""verl's rollout server on refit.

It has the methods that verl calls on the Ray actor of its SGLang or vLLM server, and calls refit over HTTP.

    VERL_USE_EXTERNAL_MODULES=refit_verl python -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=sglang ...

verl imports that module in each of its processes, and its replicas are made here from then on. Calling
`refit_verl.install()` in the process that makes them (the task runner, a Ray actor) does the same.

Each replica starts `refit serve` on the GPUs of its workers ($REFIT_COMMAND, default "refit"; more flags in
$REFIT_FLAGS), or uses the server of its number in $REFIT_URLS; teachers and reward models always start their own. The
actor has the name that verl's SGLang worker looks for, and that worker sends the weights over HTTP, as it does to
SGLang. If the trainer sends a LoRA adapter instead (lora.merge=False), servers are started with --enable-lora, and
requests name the adapter.
"""

import asyncio
import os
import shlex
import socket
import subprocess
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import refit
from refit.adapter_source import plain

# The names under which verl's servers know the LoRA adapter of the trainer.
ADAPTERS = {"sglang": "verl_actor_lora_name", "vllm": "123"}
# How often a server is started whose free port another process takes first.
STARTS = 3


@dataclass
class OwnTokenOutput:
    """The same as verl's TokenOutput, for when verl is not installed."""

    token_ids: list
    log_probs: list = None
    routed_experts: object = None
    stop_reason: str = None
    num_preempted: int = None
    extra_fields: dict = field(default_factory=dict)


def token_output(**fields):
    try:
        from verl.workers.rollout.replica import TokenOutput
    except ImportError:
        TokenOutput = OwnTokenOutput
    return TokenOutput(**fields)


class RefitServer:
    """One server.

    config: verl's rollout config (max_model_len, prompt_length, response_length, free_cache_engine).
    mode: "hybrid", "colocated" or "standalone". gpus: the value of CUDA_VISIBLE_DEVICES, or None. url: a server that
    runs already. adapter: the LoRA adapter that requests use, one of ADAPTERS, or None: the trainer sends whole
    weights. lora_rank: the adapter's rank."""

    def __init__(
        self,
        config,
        model_path=None,
        mode="hybrid",
        replica_rank=0,
        ranks=1,
        gpus=None,
        url=None,
        api_key=None,
        adapter=None,
        lora_rank=None,
    ):
        self.config, self.model_path, self.mode, self.ranks, self.gpus = config, model_path, mode, ranks, gpus
        self.replica_rank, self.adapter, self.lora_rank = replica_rank, adapter, lora_rank
        self.url, self.api_key = url, api_key or os.environ.get("REFIT_API_KEY")
        self.client, self.process, self.global_steps, self.max_model_len = None, None, None, None
        self.pool = ThreadPoolExecutor(1024)

    async def launch_server(self, **_):
        if self.url is None:
            self.url = await self.in_thread(self.start)
        await self.in_thread(self.wait)
        self.client = refit.Client(self.url, self.api_key)
        known = self.config.max_model_len
        self.max_model_len = known or (await self.in_thread(self.client.server_info))["context_length"]

    def start(self):
        address = own_address()
        port = free_port(address)
        flags = ["--host", address, "--port", str(port), "--tp", str(self.ranks), "--skip-tokenizer-init"]
        # A colocated server gets no weights from the trainer, so its own must survive a release.
        flags += ["--enable-weights-cpu-backup"] if self.mode == "colocated" else []
        flags += ["--context-length", str(self.config.max_model_len)] if self.config.max_model_len else []
        if self.adapter is not None:
            # Running requests may be on the version before, and new ones on the next.
            flags += ["--enable-lora", "--max-loras", "2", "--max-lora-rank", str(self.lora_rank)]
        flags += shlex.split(os.environ.get("REFIT_FLAGS", ""))
        model = local_model(self.model_path)
        command = [*shlex.split(os.environ.get("REFIT_COMMAND", "refit")), "serve", model, *flags]
        visible = {"CUDA_VISIBLE_DEVICES": self.gpus} if self.gpus else {}
        self.process = subprocess.Popen(command, env={**os.environ, **visible})
        return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"

    def wait(self):
        tries = STARTS
        while not refit.Client(self.url, self.api_key, timeout=5).ready():
            if self.process is not None and self.process.poll() is not None:
                tries -= 1
                # Another process may take the free port before the server listens on it.
                if tries == 0 or is_free(*self.get_server_address()):
                    raise RuntimeError(f"refit ended with {self.process.returncode} before it was ready")
                self.url = self.start()
            time.sleep(0.1)

    async def in_thread(self, call, *args):
        return await asyncio.get_running_loop().run_in_executor(self.pool, call, *args)

    def get_server_address(self):
        """(host, port)"""
        parts = urllib.parse.urlsplit(self.url)
        return parts.hostname, parts.port

    def get_master_address(self):
        return self.get_server_address()

    async def generate(
        self, prompt_ids, sampling_params, request_id, image_data=None, video_data=None, audio_data=None, **_
    ):
        """Returns a TokenOutput.

        verl's rule for the number of tokens: the requested number, else the response's length; never more than fits.
        `prompt_logprobs` is what verl's teachers are asked for: the log probability of each token of the prompt (0),
        or the best k at each position."""
        if image_data or video_data or audio_data:
            raise ValueError("refit generates from text alone")
        prompt, params = list(prompt_ids), dict(sampling_params)
        room = self.max_model_len - len(prompt)
        if room < 0:
            raise ValueError(f"the prompt has {len(prompt)} tokens, but max_model_len is {self.max_model_len}")
        wanted = params.pop("max_tokens", None)
        wanted = params.pop("max_new_tokens", wanted)
        if wanted is None:
            response = self.config.response_length
            wanted = min(response, self.config.prompt_length + response - len(prompt))
        params["max_new_tokens"] = max(0, min(wanted, room))
        # Token ids are returned in any case, and the server makes text of them only if it has a tokenizer.
        params.pop("detokenize", None)
        best = params.pop("prompt_logprobs", None)
        logprobs = bool(params.pop("logprobs", False)) or best is not None
        fields = {} if best is None else dict(logprob_start_len=0, top_logprobs_num=best)
        # An adapter that is not loaded is an error: the base model's tokens would pass for the policy's.
        fields |= {} if self.adapter is None else dict(lora_path=self.adapter)
        reply = await self.in_thread(
            lambda: self.client.generate(prompt, params, rid=request_id, return_logprob=logprobs, **fields)
        )
        meta = reply["meta_info"]
        scores = {} if best is None else prompt_scores(meta, best)
        return token_output(
            token_ids=reply["output_ids"],
            log_probs=[entry[0] for entry in meta["output_token_logprobs"]] if logprobs else None,
            stop_reason=(meta["finish_reason"] or {}).get("type"),
            num_preempted=meta["num_retractions"],
            extra_fields=dict(global_steps=self.global_steps, weight_version=meta["weight_version"], **scores),
        )

    async def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        """verl's vLLM worker has its engine load weights from the worker on each GPU, which sends them over ZeroMQ.

        refit answers on those sockets itself. With `peft_config` after the base weights, they are a LoRA adapter."""
        kwargs = kwargs or {}
        if method != "update_weights_from_ipc":
            raise ValueError(f"refit has no method {method!r} of vLLM's workers")
        prefix = f"ipc:///tmp/rl-colocate-zmq-{job_id()}-replica-{self.replica_rank}"
        sockets = {str(rank): f"{prefix}-rank-{rank}.sock" for rank in range(self.ranks)}
        body = dict(zmq_handles=sockets, **({} if timeout is None else dict(timeout=timeout)))
        config = kwargs.get("peft_config") if kwargs.get("base_sync_done") else None
        if not config:
            return await self.send("/update_weights_from_ipc", body)
        name = self.adapter or ADAPTERS["vllm"]
        # A refused adapter is received and dropped by the server, so the worker never waits for a reply in vain.
        body |= dict(lora_name=name, config_dict=plain(config), upsert=True)
        await self.send("/load_lora_adapter_from_ipc", body)
        self.adapter = name

    async def send(self, path, body):
        await self.in_thread(lambda: self.client.json("POST", path, body, admin=True, retry=False))

    async def wait_for_requests_to_drain(self):
        await self.in_thread(self.client.flush, 600)

    async def set_global_steps(self, global_steps):
        """Sets verl's number of the weights. It becomes their label too, because verl's worker sends none."""
        self.global_steps = global_steps
        await self.in_thread(lambda: self.client.set_version(str(global_steps)))

    async def abort_all_requests(self, **_):
        await self.in_thread(self.client.pause, "abort")

    async def resume_generation(self):
        await self.in_thread(self.client.resume)

    async def wake_up(self, tags=None):
        """tags: only verl's vLLM worker passes them; its SGLang worker wakes the server over HTTP."""
        if self.mode == "hybrid" and tags is None:
            raise ValueError("hybrid: the update of the weights wakes them")
        if tags is not None:
            return await self.in_thread(self.client.resume_memory, list(tags))
        whole = self.mode == "colocated" and self.adapter != ADAPTERS["sglang"]
        await self.in_thread(self.client.resume_memory, ["kv_cache", "weights"] if whole else ["kv_cache"])

    async def sleep(self, **_):
        if not self.config.free_cache_engine:
            return
        if self.adapter is None and self.mode != "standalone":
            return await self.in_thread(self.client.release_memory, ["kv_cache", "weights"])
        await self.in_thread(self.client.release_memory, ["kv_cache"])
        # The trainer sends the base once, so its bytes must survive. verl's SGLang worker does not resume them.
        if self.adapter == ADAPTERS["vllm"] and self.mode != "standalone":
            await self.in_thread(lambda: self.client.call("POST", "/sleep?level=1&tags=weights", admin=True))

    async def clear_kv_cache(self):
        await self.in_thread(self.client.flush, 60)

    async def release_kv_cache(self):
        if self.config.free_cache_engine:
            await self.in_thread(self.client.release_memory, ["kv_cache"])

    async def resume_kv_cache(self):
        if self.config.free_cache_engine:
            await self.in_thread(self.client.resume_memory, ["kv_cache"])

    async def start_profile(self, **_):
        """Does nothing: /metrics has the figures."""

    async def stop_profile(self):
        """Does nothing."""

    def shutdown(self):
        if self.process is not None:
            self.process.terminate()
            self.process.wait()


def prompt_scores(meta, best):
    """The prompt's log probabilities as verl reads them: one row for each token.

    Row i scores token i + 1, so the first token has none and the last row is zeros."""
    rows = meta["input_top_logprobs"] if best > 0 else [[entry] for entry in meta["input_token_logprobs"]]
    zeros = max(best, 1)
    return dict(
        prompt_ids=[[token for _, token, _ in row] for row in rows[1:]] + [[0] * zeros],
        prompt_logprobs=[[value for value, _, _ in row] for row in rows[1:]] + [[0.0] * zeros],
    )


def local_model(path):
    """The model on this node: verl's own servers copy it from a remote file system, too."""
    try:
        from verl.utils.fs import copy_to_local
    except ImportError:
        return path
    return copy_to_local(path)


def lora_rank_of(model):
    """The rank of the adapter that the trainer sends; 0 if it sends whole weights. Megatron's is in `lora`, FSDP's is
    not."""
    lora = getattr(model, "lora", None) or {}
    return 0 if lora.get("merge") else lora.get("rank") or getattr(model, "lora_rank", None) or 0


def url_of(replica_rank):
    known = os.environ.get("REFIT_URLS", "")
    return known.split(",")[replica_rank] if known else None


def job_id():
    try:
        import ray

        return ray.get_runtime_context().get_job_id()
    except ImportError:
        return os.environ.get("VERL_RAY_JOB_ID", "0")


def own_address():
    try:
        import ray

        return ray.util.get_node_ip_address().strip("[]")
    except ImportError:
        return "127.0.0.1"


def free_port(address, port=0):
    """A free port, or `port` itself if it is given. Raises OSError if it is not free."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, port))
        return probe.getsockname()[1]


def is_free(address, port):
    try:
        return free_port(address, port) == port
    except OSError:
        return False


def replica_class(name="sglang"):
    """A RolloutReplica of verl whose servers are RefitServer actors. name: the rollout whose worker in verl looks for
    them."""
    import ray
    from verl.workers.rollout.replica import RolloutReplica

    class RefitReplica(RolloutReplica):
        async def launch_servers(self):
            if self.nnodes != 1:
                where = f"{self.world_size} GPUs on {self.nnodes} nodes"
                raise ValueError(f"refit serves a replica from one node; this one has {where}")

            def place(_):
                return ray.get_runtime_context().get_node_id(), os.environ.get("CUDA_VISIBLE_DEVICES", "")

            places = await asyncio.gather(*[worker.__ray_call__.remote(place) for worker in self.workers])
            gpus = ",".join(dict.fromkeys(gpu for _, visible in places for gpu in visible.split(",") if gpu))
            kind = "teacher_" if getattr(self, "is_teacher_model", False) else ""
            kind = "reward_" if self.is_reward_model else kind
            # verl numbers the replicas of each teacher from 0, and gives each teacher a suffix.
            suffix = getattr(self, "name_suffix", "")
            # Teachers and reward models get no adapter.
            lora_rank = 0 if kind else lora_rank_of(self.model_config)
            node = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id=places[0][0], soft=False)
            options = dict(
                name=f"{name}_server_{kind}{self.replica_rank}_0{suffix}",
                scheduling_strategy=node,
                num_cpus=0,
                max_concurrency=2000,
                runtime_env={"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}},
            )
            actor = ray.remote(RefitServer).options(**options)
            server = actor.remote(
                config=self.config,
                # verl gives teachers the path alone; the actor looks for it on its own node.
                model_path=getattr(self.model_config, "local_path", None) or self.model_config.path,
                mode=self.rollout_mode.value,
                replica_rank=self.replica_rank,
                ranks=self.config.tensor_model_parallel_size,
                gpus=gpus or None,
                url=None if kind else url_of(self.replica_rank),
                adapter=ADAPTERS[name] if lora_rank > 0 else None,
                lora_rank=lora_rank,
            )
            await server.launch_server.remote()
            host, port = await server.get_server_address.remote()
            self.servers, self._server_handle = [server], server
            self._server_address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    return RefitReplica


def install(name="sglang"):
    """verl makes its rollout replicas of this name here from now on."""
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    RolloutReplicaRegistry.register(name, lambda: replica_class(name))


if "refit_verl" in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(","):
    install("sglang")
    install("vllm")
