"""verl's own LoRA synchronisation over its vLLM worker, into refit's Ray actor. Commands and replies are JSON.

Real: the step of verl's worker (engine_workers.py), what its FSDP engine sends (transformer_impl.py, fsdp_utils.py),
its ServerAdapter of vLLM and its sender of buckets. Not installed, so replaced: its device functions, configuration
(plain objects) and the classes around these methods. The model is no FSDP module, and the buffer is shared memory.
"""

import ast
import asyncio
import os
import sys
import types

import released

released.bare(
    "verl",
    *("verl", "verl.third_party", "verl.utils", "verl.workers", "verl.workers.rollout"),
    "verl.workers.rollout.vllm_rollout",
)
released.absent("fastapi", "tensordict", "uvicorn", "yaml")
released.absent("verl.models", "verl.utils.tokenizer", "verl.workers.config")
CLIENTS = str(released.ROOT / "clients/python")
sys.path.append(CLIENTS)

import ray  # noqa: E402
import torch  # noqa: E402

DEVICE = types.SimpleNamespace(**dict.fromkeys(("synchronize", "empty_cache", "ipc_collect"), lambda: None))
released.replace(
    "verl.utils.device",
    get_device_id=lambda: "cpu",
    get_device_name=lambda: "cpu",
    get_torch_device=lambda: DEVICE,
    is_support_ipc=lambda: False,
)
released.replace("verl.utils.config", omega_conf_to_dataclass=lambda config: config)
released.replace("verl.third_party.vllm", VLLM_SLEEP_LEVEL=2)
sys.modules["verl"].DataProto = object

from answering import answer  # noqa: E402
from peft_replies import adapted  # noqa: E402

import refit_verl  # noqa: E402
from verl.utils.fsdp_utils import collect_lora_params, fsdp_version, replace_lora_wrapper  # noqa: E402
from verl.utils.model import convert_weight_keys  # noqa: E402
from verl.workers.rollout.vllm_rollout import vllm_rollout  # noqa: E402


def methods(path, kind, *names, **space):
    """Methods of a class of verl whose module would import a whole trainer."""
    source = (released.folder_of("verl") / path).read_text()
    made = next(node for node in ast.parse(source).body if getattr(node, "name", None) == kind)
    body = [node for node in made.body if getattr(node, "name", None) in names]
    for node in body:
        node.decorator_list = []
    exec(compile(ast.Module(body, []), path, "exec"), space)  # noqa: S102
    return [space[name] for name in names]


class Sender(vllm_rollout.BucketedWeightSender):
    """verl's sender with a buffer below the megabyte that its option can say: the base's largest tensor fits, and an
    adapter of rank 16 needs two buckets."""

    def __init__(self, **options):
        super().__init__(**options)
        self.bucket_size = 80 << 10


vllm_rollout.BucketedWeightSender = Sender


def nothing(*_, **__):
    pass


(per_tensor_param,) = methods(
    "verl/workers/engine/fsdp/transformer_impl.py",
    "FSDPEngine",
    "get_per_tensor_param",
    DTensor=torch.distributed.tensor.DTensor,
    collect_lora_params=collect_lora_params,
    convert_weight_keys=convert_weight_keys,
    fsdp_version=fsdp_version,
    get_device_id=lambda: "cpu",
    load_fsdp_model_to_gpu=nothing,
    log_gpu_memory_usage=nothing,
    logger=None,
    replace_lora_wrapper=replace_lora_wrapper,
    unfuse_moe_params=lambda params, _: params,
)
(update_weights,) = methods(
    "verl/workers/engine_workers.py",
    "ActorRolloutRefWorker",
    "update_weights",
    asyncio=types.SimpleNamespace(to_thread=lambda *_: asyncio.sleep(0)),
    get_torch_device=lambda: DEVICE,
    log_gpu_memory_usage=nothing,
    logger=None,
    set_expandable_segments=nothing,
    torch=torch,
)


class Config(types.SimpleNamespace):
    """A part of verl's configuration: members, and `get`."""

    def get(self, name, other=None):
        return getattr(self, name, other)


class Trainer:
    def start(self, url, rank):
        """The trainer's worker, and the actor of a server that runs already."""
        # Ray starts its workers with the variables of its own start. With a `runtime_env` it would start each twice.
        os.environ["PYTHONPATH"] = os.pathsep.join([CLIENTS, os.environ.get("PYTHONPATH", "")])
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        os.environ.update(RANK="0", RAY_LOCAL_WORLD_SIZE="1")
        rollout = Config(
            name="vllm",
            load_format="dummy",
            max_model_len=256,
            prompt_length=64,
            response_length=8,
            free_cache_engine=True,
            layered_summon=False,
            tensor_model_parallel_size=1,
            data_parallel_size=1,
            pipeline_model_parallel_size=1,
            checkpoint_engine=Config(backend="naive", update_weights_bucket_megabytes=1),
        )
        model = Config(lora={}, lora_rank=rank, hf_config=Config(model_type="qwen3"))
        adapter = refit_verl.ADAPTERS["vllm"] if refit_verl.lora_rank_of(model) else None
        kind = ray.remote(refit_verl.RefitServer).options(name="vllm_server_0_0", num_cpus=0, max_concurrency=100)
        plain = types.SimpleNamespace(**vars(rollout))
        plain.checkpoint_engine = None
        self.server = kind.remote(config=plain, url=url, adapter=adapter, lora_rank=rank)
        ray.get(self.server.launch_server.remote())
        engine = Config(
            is_param_offload_enabled=False,
            model_config=model,
            _is_offload_param=False,
            _qat_enabled=False,
            _uses_fsdp2_cpu_offload_policy=True,
        )
        engine.get_per_tensor_param = types.MethodType(per_tensor_param, engine)
        self.worker = Config(
            actor=Config(engine=engine),
            base_sync_done=False,
            config=Config(rollout=rollout),
            layered_summon=False,
            peft_merge=False,
            rollout=vllm_rollout.ServerAdapter(config=rollout, model_config=model, device_mesh=None, replica_rank=0),
        )

    def step(self, seed, step):
        """A step of the trainer: the engine sleeps, then gets what verl sends."""
        self.worker.actor.engine.module = adapted("qwen3", seed, rank=16)
        ray.get(self.server.wait_for_requests_to_drain.remote())
        ray.get(self.server.sleep.remote())
        asyncio.run(update_weights(self.worker, global_steps=step))

    def generate(self, prompt):
        params = dict(temperature=0.0, logprobs=True, ignore_eos=True, max_tokens=6)
        output = ray.get(self.server.generate.remote(prompt_ids=prompt, sampling_params=params, request_id="r"))
        return dict(tokens=list(output.token_ids), logprobs=output.log_probs, step=output.extra_fields["global_steps"])

    def stop(self):
        ray.shutdown()


if __name__ == "__main__":
    answer(Trainer())
