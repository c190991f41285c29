"""TRL's asynchronous GRPO with a PEFT model: its own choice of the sync, its sync, and its requests for rollouts.

Real: AsyncGRPOTrainer._init_lora_sync, _sync_weight and all that they call, and the rollout loop's turn. Not done:
their constructors, which would load a model and start processes; the fields that they set are set here.
"""

import asyncio
import collections
import os
import types

import released

released.trl_trainer()

import aiohttp  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from answering import answer  # noqa: E402
from peft_replies import adapted, fill  # noqa: E402
from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer  # noqa: E402
from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop  # noqa: E402
from trl.experimental.async_grpo.vllm_client import VLLMClient  # noqa: E402


class Loop(_AsyncRolloutLoop):
    """The rollout loop of one process: the trainer's version reaches it at once."""

    def __init__(self, url, name):
        self.vllm_server_url, self.model_name, self.lora_name = url, "default", name
        self._model_version_value = types.SimpleNamespace(value=0)
        self.max_tokens, self.temperature, self.top_p, self.top_k, self.min_p = 4, 1.0, 1.0, -1, None
        self.repetition_penalty, self.request_timeout = 1.0, 60
        self._counters = collections.Counter()

    def update_model_version(self, version):
        self._model_version_value.value = version

    async def turn(self, prompt):
        async with aiohttp.ClientSession() as self.session:
            return await self._generate_one_turn(prompt)


class Commands:
    def start(self, url, folder, staleness):
        self.model = adapted("qwen3", 1)
        trainer = self.trainer = object.__new__(AsyncGRPOTrainer)
        trainer.model, trainer.accelerator = self.model, Accelerator(cpu=True)
        trainer.args = types.SimpleNamespace(max_staleness=staleness)
        trainer.vllm_client = VLLMClient(url, 60)
        trainer.model_version, trainer.rollout_worker = 0, None
        trainer._lora_name, trainer._adapter_name = "trl-policy", self.model.active_adapters[0]
        trainer._lora_dir = os.path.join(folder, ".vllm_lora")
        trainer._metrics = {"train": collections.defaultdict(list)}
        try:
            trainer._lora_sync = trainer._init_lora_sync(self.model)
        except ValueError as error:
            return str(error)
        trainer.rollout_worker = self.loop = Loop(url, trainer._lora_name if trainer._lora_sync else None)
        return trainer._lora_sync

    def sync(self, seed):
        fill(self.model, seed, size=0.08)
        self.trainer._sync_weight()
        return self.loop._request_model

    def turn(self, prompt, version=None):
        if version is not None:
            self.loop.update_model_version(version)
        return asyncio.run(self.loop.turn(prompt))


if __name__ == "__main__":
    answer(Commands())
