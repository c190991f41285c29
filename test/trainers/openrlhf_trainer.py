"""OpenRLHF's own actor trainer and generator of samples, in front of clients/python/refit_openrlhf.py.

Real: ActorPPOTrainer, SamplesGenerator, the trainers that tell engines when to sleep, wake and pause, and the executor
that generates. Replaced: Ray's actors, by threads of this process, and DeepSpeed's engine around the model.
"""

import asyncio
import concurrent.futures
import os
import sys
import threading
import types

import released

released.openrlhf()
sys.path.append(str(released.ROOT / "clients/python"))

import ray  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from answering import answer  # noqa: E402
from tensors import coded  # noqa: E402

Space = types.SimpleNamespace


class Method:
    def __init__(self, actor, name):
        self.actor, self.name = actor, name

    def remote(self, *args, **options):
        async def run():
            result = getattr(self.actor.made, self.name)(*args, **options)
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(run(), self.actor.loop)


class Handle:
    """Ray's handle of an actor: its calls run on one event loop."""

    def __init__(self, made):
        self.made, self.loop = made, asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def __getattr__(self, name):
        return Method(self, name)


class Remote:
    """A class that `ray.remote` was applied to."""

    def __init__(self, kind):
        self.kind = kind

    def options(self, **_):
        return self

    def remote(self, *args, **options):
        return Handle(self.kind(*args, **options))


def remote(*kinds, **_):
    return Remote(*kinds) if kinds else Remote


def get(asked, timeout=120):
    return [get(one) for one in asked] if isinstance(asked, list) else asked.result(timeout)


def wait(asked, num_returns, timeout):
    done, _ = concurrent.futures.wait(asked, timeout, return_when=concurrent.futures.FIRST_COMPLETED)
    ready = [one for one in asked if one in done][:num_returns]
    return ready, [one for one in asked if one not in ready]


ray.remote, ray.get, ray.wait = remote, get, wait
ray._private = Space(services=Space(get_node_ip_address=lambda: "127.0.0.1"))

import refit_openrlhf  # noqa: E402
from openrlhf.trainer.ppo_trainer_async import TrainingActor  # noqa: E402
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator  # noqa: E402
from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer  # noqa: E402


class Trainer:
    def start(self, urls, ranks, model, tokenizer, rewards, sleeps, scratch):
        """As train_ppo_ray makes engines, actors and trainers. `rewards`: a file of --reward.remote_url."""
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo", init_method=f"file://{scratch}/store", rank=0, world_size=1)
        vllm = Space(num_engines=len(urls), tensor_parallel_size=ranks, sync_backend="gloo")
        vllm.enable_sleep, vllm.enable_prefix_caching = sleeps, True
        correction = dict(level="token", mode="mask", gating="ratio", threshold=(0.5, 5.0))
        advantage = Space(**{f"is_correction_{name}": value for name, value in correction.items()})
        actor = Space(eps_clip_low_high=(0.2, 0.2), dual_clip=None, loss_agg_mode="token-mean")
        actor.policy_loss_type, actor.aux_loss_coef = "ppo", 0
        self.args = Space(
            vllm=vllm,
            actor=actor,
            algo=Space(advantage=advantage, dynamic_filtering_enable=False),
            ds=Space(packing_samples=False, zero_stage=2, tensor_parallel_size=1),
            rollout=Space(batch_size=2, n_samples_per_prompt=2),
            train=Space(max_epochs=1, dynamic_batch_enable=False, colocate_all=False, async_enable=True),
        )
        os.environ["REFIT_URLS"] = ",".join(urls)
        refit_openrlhf.install()
        package = sys.modules["openrlhf.trainer.ray"]
        engines = package.create_vllm_engines(len(urls), ranks, model, vllm_enable_sleep=sleeps, remote_rm_url=rewards)
        config = transformers.AutoConfig.from_pretrained(model)
        self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        strategy = Space(args=self.args)
        policy = Space(model=Space(module=self.model))
        self.actor = ActorPPOTrainer(strategy, policy, None, None, None, vllm_engines=engines)
        tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer)
        self.generator = SamplesGenerator(strategy, [], [], tokenizer, engines)
        self.trainer = object.__new__(TrainingActor.kind)
        self.trainer.args, self.trainer.vllm_engines = self.args, engines
        # As a RayActorGroup of one actor.
        policy_actor = Handle(self.actor)
        group = Space(async_run_method=lambda method_name: [getattr(policy_actor, method_name).remote()])
        self.trainer.actor_model_group = group
        self.trainer.vllm_lock = Handle(asyncio.Lock())
        self.trainer._partial_rollout = not sleeps

    def update(self, variant):
        """As the trainer after a step."""
        for name, parameter in self.model.named_parameters():
            parameter.data.copy_(coded(variant, name, tuple(parameter.shape)))
        self.trainer.broadcast_to_vllm()

    def samples(self, prompts, count):
        loader = [["source", [prompt], [f"label of {prompt}"], [None]] for prompt in prompts]
        self.generator.prompts_dataloader, self.generator._dataloader_iter = loader, None
        made, _, consumed, exhausted = self.generator.generate_samples(
            temperature=0.0, top_p=1.0, top_k=-1, max_new_tokens=count, min_new_tokens=count, max_len=512
        )
        assert consumed == len(prompts)
        return [self.plain(one) for one in made]

    def plain(self, one):
        actions = one.action_mask[0].bool()
        return dict(
            prompt=one.prompts[0],
            label=one.labels[0],
            sequence=one.sequences[0].tolist(),
            tokens=one.sequences[0][1:][actions].tolist(),
            logprobs=one.rollout_log_probs[0][actions].tolist(),
            reward=one.rewards.tolist(),
            truncated=one.truncated.tolist(),
        )

    def begin_samples(self, prompts, count):
        """Generates in a thread, beside what the trainer does next."""
        self.beside = concurrent.futures.ThreadPoolExecutor(1).submit(self.samples, prompts, count)

    def end_samples(self):
        return self.beside.result(60)

    def stop(self):
        self.actor._model_update_group.destroy()


if __name__ == "__main__":
    answer(Trainer())
