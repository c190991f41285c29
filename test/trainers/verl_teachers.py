"""verl's own distillation with two teachers, whose servers are refit's Ray actors. Commands and replies are JSON.

Real: verl's RolloutReplica, its teacher manager and what it expects of a server's scores. Not installed, so replaced:
its worker groups, its configuration (plain objects) and the client that balances the load over a teacher's replicas.
"""

import ast
import asyncio
import os
import sys
import types

import released

released.bare(
    "verl",
    *("verl", "verl.experimental", "verl.experimental.teacher_loop", "verl.single_controller", "verl.utils"),
    *("verl.workers", "verl.workers.rollout"),
)
CLIENTS = str(released.ROOT / "clients/python")
sys.path.append(CLIENTS)

import ray  # noqa: E402
from answering import answer  # noqa: E402


class WorkerGroup:
    """The workers on the GPUs of a replica: one, on no GPU."""

    def __init__(self, **_):
        self.workers = [ray.remote(Worker).options(num_cpus=0).remote()]


class Worker:
    pass


kinds = ("DistillationConfig", "DistillationLossConfig", "DistillationTeacherModelConfig", "HFModelConfig")
released.replace("omegaconf", DictConfig=object)
released.replace(
    "verl.single_controller.ray",
    **dict.fromkeys(("RayClassWithInitArgs", "RayResourcePool", "ResourcePoolManager"), types.SimpleNamespace),
    RayWorkerGroup=WorkerGroup,
)
released.replace("verl.utils.config", omega_conf_to_dataclass=lambda config: config)
released.replace("verl.utils.device", get_device_name=lambda: "cpu")
released.replace("verl.workers.config", **dict.fromkeys((*kinds, "RolloutConfig"), object))
released.replace("verl.workers.rollout.llm_server", LLMServerClient=object)
released.replace("verl.checkpoint_engine")
released.replace("verl.checkpoint_engine.base", CheckpointEngineWorker=Worker)

import refit  # noqa: E402
import refit_verl  # noqa: E402
from verl.experimental.teacher_loop.teacher_manager import AsyncTeacherLLMServerManager  # noqa: E402
from verl.workers.rollout.replica import get_rollout_replica_class  # noqa: E402


def scores_of_sglang():
    """verl's function that reads SGLang's reply; its module would import SGLang."""
    path = released.folder_of("verl") / "verl/workers/rollout/sglang_rollout/async_sglang_server.py"
    name = "_extract_prompt_logprobs_sglang"
    body = [node for node in ast.parse(path.read_text()).body if getattr(node, "name", None) == name]
    space = {}
    exec(compile(ast.Module(body, []), str(path), "exec"), space)  # noqa: S102
    return space[name]


class Client:
    """LLMServerClient over the only replica of a teacher."""

    def __init__(self, replica):
        self.replica = replica

    async def generate(self, request_id, **asked):
        return await self.replica.server_handle.generate.remote(request_id=request_id, **asked)


class Trainer:
    def start(self, models, ranks, environment):
        """models: teacher -> folder."""
        # Ray starts its workers with the variables of its own start. With a `runtime_env` it would start each twice.
        path = os.pathsep.join([CLIENTS, os.environ.get("PYTHONPATH", "")])
        os.environ.update(environment, PYTHONPATH=path)
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        refit_verl.install("sglang")
        self.models, self.teachers = models, {}
        for key, folder in models.items():
            # As verl's teacher_model.py makes them.
            self.teachers[key] = get_rollout_replica_class("sglang")(
                replica_rank=0,
                config=types.SimpleNamespace(
                    tensor_model_parallel_size=ranks,
                    data_parallel_size=1,
                    pipeline_model_parallel_size=1,
                    max_model_len=None,
                    prompt_length=64,
                    response_length=1,
                    free_cache_engine=True,
                ),
                model_config=types.SimpleNamespace(path=folder),
                is_teacher_model=True,
                name_suffix=key.replace("/", "_"),
            )
        asyncio.run(self.launch())
        return [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]

    async def launch(self):
        await asyncio.gather(*[teacher.init_colocated(None) for teacher in self.teachers.values()])

    def addresses(self):
        return [teacher.server_address for teacher in self.teachers.values()]

    def score(self, sequence, key, best):
        """The teacher's scores by way of verl's manager, and what verl reads from the server's own reply."""
        loss = types.SimpleNamespace(topk=best, loss_settings=types.SimpleNamespace(use_topk=best > 0))
        inference = types.SimpleNamespace(temperature=1.0)
        config = types.SimpleNamespace(
            distillation_loss=loss,
            teacher_key="data_source",
            teacher_models={key: types.SimpleNamespace(inference=inference) for key in self.teachers},
        )
        manager = AsyncTeacherLLMServerManager(
            types.SimpleNamespace(distillation=config),
            {key: Client(teacher) for key, teacher in self.teachers.items()},
        )
        ids, values = asyncio.run(manager.compute_teacher_logprobs_single(sequence, routing_key=key))
        reply = refit.Client(f"http://{self.teachers[key].server_address}").generate(
            sequence, dict(max_new_tokens=1), return_logprob=True, logprob_start_len=0, top_logprobs_num=best
        )
        wanted = {}
        scores_of_sglang()(reply["meta_info"], best, len(sequence), wanted)
        return dict(ids=ids.tolist(), logprobs=values.tolist(), wanted=wanted)

    def stop(self):
        for teacher in self.teachers.values():
            ray.get(teacher.server_handle.shutdown.remote())
        ray.shutdown()


if __name__ == "__main__":
    answer(Trainer())
