"""OpenRLHF's engine actor in front of a refit server.

It has the methods of `RolloutRayActor` (openrlhf/trainer/ray/vllm_engine.py) and calls the server over HTTP.

    refit serve MODEL --port 30000                      # on GPUs that the trainer does not use, or (IPC) on the same
    REFIT_URLS=http://127.0.0.1:30000 python -m refit_openrlhf ...   # arguments of openrlhf.cli.train_ppo_ray

Each call sends one parameter, by PyNccl from the trainer's rank 0 or as CUDA IPC handles of all ranks, and becomes a
vLLM-style /update_weights with one name. The first parameter of a round begins an update and the last (`empty_cache`)
ends it, so nothing is generated from a mixture.
"""

import asyncio
import base64
import os
import pickle
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import refit

# vLLM's names of sampling parameters -> those of /generate.
SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "skip_special_tokens": "skip_special_tokens",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}


@dataclass
class Logprob:
    logprob: float


@dataclass
class CompletionOutput:
    """The fields of vLLM's class of this name that executors read. logprobs: [{token id: Logprob}] or None."""

    text: str
    token_ids: list
    logprobs: list
    finish_reason: str
    index: int = 0


@dataclass
class RequestOutput:
    prompt_token_ids: list
    outputs: list = field(default_factory=list)


class RolloutActor:
    """One refit server.

    url: default: entry `index` of $REFIT_URLS (separated by commas). `model` and other options of vLLM are not used."""

    def __init__(self, *args, url=None, index=0, agent_func_path=None, remote_rm_url=None, api_key=None, **kwargs):
        self.client = refit.Client(url or urls()[index], api_key or os.environ.get("REFIT_API_KEY"))
        self.client.wait_ready()
        self.pool = ThreadPoolExecutor(1024)
        self.running, self.round, self.begun = 0, 0, False
        self.agent_func_path, self.remote_rm_url, self.executor = agent_func_path, remote_rm_url, None

    async def post(self, path, body=None, **query):
        """Posts in a thread: some calls end only after other calls of the same actor."""
        query = {name: value for name, value in query.items() if value is not None}
        path = f"{path}?{urllib.parse.urlencode(query, doseq=True)}" if query else path
        return await self.in_thread(lambda: self.client.call("POST", path, body, admin=True))

    async def in_thread(self, call):
        return await asyncio.get_running_loop().run_in_executor(self.pool, call)

    async def init_process_group(
        self, master_address, master_port, rank_offset, world_size, group_name, backend, use_ray=False
    ):
        if use_ray:
            raise ValueError("vllm.sync_with_ray: refit does not join groups of Ray; turn it off")
        place = dict(master_address=master_address, master_port=int(master_port))
        place.update(rank_offset=rank_offset, world_size=world_size)
        own = dict(backend=backend, group_name=group_name) if backend == "gloo" else {}
        return await self.post("/init_weight_transfer_engine", dict(init_info={**place, **own}))

    async def update_weight(self, name, dtype, shape, empty_cache=False):
        return await self.update(name, dtype, shape, empty_cache)

    async def update_weight_cuda_ipc(self, name, dtype, shape, ipc_handles, empty_cache=False):
        handles = base64.b64encode(pickle.dumps([ipc_handles])).decode()
        return await self.update(name, dtype, shape, empty_cache, ipc_handles_pickled=handles)

    async def update(self, name, dtype, shape, last, **info):
        if not self.begun:
            await self.post("/start_weight_update", {})
            self.begun = True
        about = dict(names=[name], dtype_names=[refit.dtype_name(dtype)], shapes=[list(shape)], **info)
        await self.post("/update_weights", dict(update_info=about))
        if last:
            self.begun, self.round = False, self.round + 1
            await self.post("/finish_weight_update", dict(weight_version=f"openrlhf-{self.round}"))

    async def reset_prefix_cache(self):
        await self.post("/reset_prefix_cache")

    async def pause_generation(self):
        await self.post("/pause", mode="keep")

    async def resume_generation(self):
        await self.post("/resume")

    async def sleep(self, level=1):
        await self.post("/sleep", level=level)

    async def wake_up(self, tags=None):
        await self.post("/wake_up", tags=tags)

    async def generate(self, prompt_token_ids, sampling_params, multi_modal_data=None):
        """Returns a RequestOutput. sampling_params: vLLM's, or any object with fields of those names."""
        if multi_modal_data:
            raise ValueError("refit generates from text alone")
        fields = {ours: getattr(sampling_params, theirs, None) for theirs, ours in SAMPLING.items()}
        fields = {name: value for name, value in fields.items() if value is not None and value != []}
        wanted = getattr(sampling_params, "logprobs", None) is not None
        prompt, self.running = list(prompt_token_ids), self.running + 1
        try:
            reply = await self.in_thread(lambda: self.client.generate(prompt, fields, return_logprob=wanted))
        finally:
            self.running -= 1
        meta, tokens = reply["meta_info"], reply["output_ids"]
        logprobs = (
            [{token: Logprob(logprob)} for logprob, token, _ in meta["output_token_logprobs"]] if wanted else None
        )
        completion = CompletionOutput(reply.get("text", ""), tokens, logprobs, meta["finish_reason"]["type"])
        return RequestOutput(prompt, [completion])

    def get_num_unfinished_requests(self):
        return self.running

    async def generate_responses(
        self, prompt, label, sampling_params, max_length, hf_tokenizer, num_samples=1, images=None
    ):
        """Runs OpenRLHF's own executors, which call `generate`."""
        if self.executor is None:
            from openrlhf.trainer.ray.vllm_engine import _load_agent_executor
            from openrlhf.utils.agent import SingleTurnAgentExecutor

            if self.agent_func_path:
                self.executor = _load_agent_executor(self.agent_func_path)
            else:
                self.executor = SingleTurnAgentExecutor(self.remote_rm_url)
        about = dict(prompt=prompt, label=label, sampling_params=sampling_params, max_length=max_length)
        about.update(hf_tokenizer=hf_tokenizer, images=images)
        return await asyncio.gather(*[self.executor.execute(llm_engine=self, **about) for _ in range(num_samples)])


def urls():
    return os.environ["REFIT_URLS"].split(",")


def create_vllm_engines(
    num_engines, tensor_parallel_size=None, pretrain=None, seed=None, full_determinism=None, enable_prefix_caching=None,
    enforce_eager=None, max_model_len=None, shared_pg=None, gpu_memory_utilization=None, vllm_enable_sleep=False,
    logprobs_mode=None, agent_func_path=None, remote_rm_url=None, **options,
):  # fmt: skip
    """Replaces OpenRLHF's function, with its arguments: makes actors in front of the servers of $REFIT_URLS.

    The actors take no GPU of Ray's. Arguments that concern vLLM are not used."""
    import ray

    if len(urls()) != num_engines:
        raise ValueError(f"REFIT_URLS: {len(urls())} servers for {num_engines} engines")
    actor, about = ray.remote(RolloutActor), dict(agent_func_path=agent_func_path, remote_rm_url=remote_rm_url)
    engines = [actor.options(num_cpus=0).remote(url=url, **about) for url in urls()]
    if vllm_enable_sleep:
        ray.get([engine.sleep.remote() for engine in engines])
    return engines


def install():
    """OpenRLHF makes its engines here from now on.

    OpenRLHF's package has imported the function from its module already, so both names are set."""
    import openrlhf.trainer.ray as package
    import openrlhf.trainer.ray.vllm_engine as module

    package.create_vllm_engines = module.create_vllm_engines = create_vllm_engines


if __name__ == "__main__":
    import runpy

    # Import this file by its name, because Ray's workers import it.
    import refit_openrlhf

    refit_openrlhf.install()
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__", alter_sys=True)
