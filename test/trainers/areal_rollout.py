"""AReaL's own client of inference servers and its FSDP trainer, which updates them. Commands and replies are JSON.

Real: RemoteInfEngine with the backends for SGLang and vLLM, its executor, FSDPEngine's groups, buckets and checkpoints.
Not done: FSDPEngine's `initialize`, which would shard the model over GPUs. Its model is transformers' own.
"""

import asyncio
import os
import pathlib
import sys
import threading
import time

import released

released.areal()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import transformers  # noqa: E402
from answering import answer  # noqa: E402
from areal.api import ModelAllocation, ModelRequest, ParallelStrategy, WeightUpdateMeta  # noqa: E402
from areal.api.cli_args import (  # noqa: E402
    GenerationHyperparameters,
    InferenceEngineConfig,
    NameResolveConfig,
    SchedulingStrategy,
    TrainEngineConfig,
)
from areal.infra.remote_inf_engine import RemoteInfEngine  # noqa: E402
from areal.infra.workflow_executor import WorkflowExecutor  # noqa: E402
from areal.utils import name_resolve  # noqa: E402
from tensors import coded  # noqa: E402

# AReaL's package has these names when its `__init__` runs.
infra = sys.modules["areal.infra"]
infra.RemoteInfEngine, infra.WorkflowExecutor = RemoteInfEngine, WorkflowExecutor
infra.RolloutController = infra.TrainController = None

from areal.engine import fsdp_engine  # noqa: E402
from areal.engine.sglang_remote import SGLangBackend  # noqa: E402
from areal.engine.vllm_remote import VLLMBackend  # noqa: E402

fsdp_engine.gethostip = lambda: "127.0.0.1"
BACKENDS = dict(sglang=SGLangBackend, vllm=VLLMBackend)
RUN = dict(experiment_name="refit", trial_name="released")


def stays(path, limit_s=10):
    """AReaL removes a checkpoint beside what it does next."""
    deadline = time.monotonic() + limit_s
    while os.path.exists(path) and time.monotonic() < deadline:
        time.sleep(0.05)
    return os.path.exists(path)


class Rollout:
    def start(self, urls, kind, model, ranks, scratch, **options):
        """`options`: more of InferenceEngineConfig."""
        name_resolve.reconfigure(NameResolveConfig(type="nfs", nfs_record_root=f"{scratch}/names"))
        allocation = f"{kind}:d{len(urls)}t{ranks}"
        config = InferenceEngineConfig(**RUN, backend=allocation, setup_timeout=60, request_timeout=60, **options)
        self.rollout = RemoteInfEngine(config, BACKENDS[kind]())
        addresses = [url.removeprefix("http://") for url in urls]
        self.rollout.initialize(engine_id="0", addr=addresses, train_data_parallel_size=1)
        if not dist.is_initialized():
            dist.init_process_group("gloo", init_method=f"file://{scratch}/store", rank=0, world_size=1)
        self.trainer = fsdp_engine.FSDPEngine(TrainEngineConfig(**RUN, path=model, backend="fsdp:d1"))
        self.trainer.logger, self.trainer.tokenizer = self.rollout.logger, None
        self.trainer._cpu_group, self.trainer._initialized = dist.group.WORLD, True
        shape = transformers.AutoConfig.from_pretrained(model)
        self.trainer.model = transformers.AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
        self.path = f"{scratch}/weight_update"
        parallel = ParallelStrategy(data_parallel_size=len(urls), tensor_parallel_size=ranks)
        self.place = ModelAllocation(kind, "rollout", parallel, SchedulingStrategy())

    def connect(self, way, chunk_mb):
        """As AReaL's PPOTrainer begins."""
        self.meta = (
            WeightUpdateMeta(type="disk", path=self.path)
            if way == "disk"
            else WeightUpdateMeta.from_fsdp_xccl(self.place, weight_chunked_mem_mb=chunk_mb)
        )
        self.trainer.connect_engine(self.rollout, self.meta)

    def train(self, variant):
        """Gives the trainer's model new weights."""
        for name, parameter in self.trainer.model.named_parameters():
            parameter.data.copy_(coded(variant, name, tuple(parameter.shape)))

    def update(self, version, variant=None):
        """As AReaL's PPOTrainer after a step. Returns whether the checkpoint is still there."""
        if variant is not None:
            self.train(variant)
        meta = self.meta.with_version(version)
        self.rollout.pause()
        self.trainer.update_weights(meta)
        self.trainer.set_version(version)
        self.rollout.set_version(version)
        self.rollout.resume()
        return meta.path is not None and stays(meta.path)

    def request(self, prompt, count, **fields):
        settings = GenerationHyperparameters(max_new_tokens=count, ignore_eos=True, greedy=True, **fields)
        return ModelRequest(input_ids=list(prompt), gconfig=settings)

    async def one(self, prompt, count, **fields):
        made = await self.rollout.agenerate(self.request(prompt, count, **fields))
        assert made.input_tokens == prompt
        return dict(
            tokens=made.output_tokens,
            logprobs=made.output_logprobs,
            versions=made.output_versions,
            stop=made.stop_reason,
            experts=None if made.routed_experts is None else made.routed_experts.tolist(),
        )

    def generate(self, prompts, count, **fields):
        async def all_of_them():
            return await asyncio.gather(*[self.one(prompt, count, **fields) for prompt in prompts])

        return asyncio.run(all_of_them())

    def begin(self, prompts, count):
        """Generates in a thread, beside what the trainer does next."""
        self.made = []
        self.beside = threading.Thread(target=lambda: self.made.extend(self.generate(prompts, count)))
        self.beside.start()

    def end(self):
        self.beside.join(60)
        return self.made

    def score(self, sequence, count):
        """The logprobs of the last `count` tokens, by way of AReaL's client for teachers."""
        mask = [0] * (len(sequence) - count) + [1] * count
        data = dict(input_ids=torch.tensor([sequence]), loss_mask=torch.tensor([mask]))
        return self.rollout.compute_logp([data])[0][0][-count:].tolist()

    def call(self, method, **arguments):
        """One of the client's methods that return nothing."""
        getattr(self.rollout, method)(**arguments)

    def refused(self, method, **fields):
        """The error of an update with a meta of these fields."""
        meta = WeightUpdateMeta(type="disk", path=str(pathlib.Path(self.path).parent), **fields)
        name = fsdp_engine.names.update_weights_from_disk(*RUN.values(), self.rollout.get_version())
        name_resolve.add(name, "0", replace=True)
        try:
            getattr(self.rollout, method)(meta).result()
        except Exception as error:  # noqa: BLE001
            return str(error)
        return None

    def stop(self):
        """The trainer ends; AReaL tells its servers nothing."""
        self.rollout.destroy()
        for group in self.trainer.weight_update_groups:
            dist.destroy_process_group(group)


if __name__ == "__main__":
    answer(Rollout())
