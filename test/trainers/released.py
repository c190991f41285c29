"""Makes the released packages of scripts/wheels.py importable in this process, which has neither GPUs nor their
dependencies.

The packages' own `__init__` files do not run: they would import whole servers. What needs a GPU has a stand-in: a group
of torch over gloo for NCCL, and streams that do nothing. Dependencies that the tested code only imports are `Absent`.
"""

import asyncio
import base64
import contextlib
import datetime
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import pathlib
import sys
import types

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOLDERS = ("test/gpu", "test/interop", "test/contract", "test/contract/zmq_senders", "examples/trainers")
sys.path[:0] = [str(ROOT / folder) for folder in FOLDERS]
# Until the first call (answering.py): a collection amid imports finds nothing.
gc.disable()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from process_group import init_custom_process_group  # noqa: E402

WHEELS = ROOT / os.environ.get("REFIT_WHEELS", "build/wheels")
TIMEOUT = datetime.timedelta(seconds=60)


def folder_of(name):
    """The folder of a package of wheels.json."""
    folder = WHEELS / name
    if not folder.exists():
        raise SystemExit(f"{folder} is missing: run `npm run test:trainers`, or `python scripts/wheels.py` once")
    return folder


def bare(wheel, *packages):
    """Packages whose modules can be imported without their `__init__`."""
    if str(folder_of(wheel)) not in sys.path:
        sys.path.append(str(folder_of(wheel)))
    for package in packages:
        spec = importlib.machinery.ModuleSpec(package, None, is_package=True)
        spec.submodule_search_locations.append(str(folder_of(wheel) / package.replace(".", "/")))
        put(package, importlib.util.module_from_spec(spec))


def put(name, module):
    """As if it had been imported: it is a member of its package, too."""
    sys.modules[name] = module
    package, _, member = name.rpartition(".")
    if package in sys.modules:
        setattr(sys.modules[package], member, module)


def replace(module, **members):
    made = types.ModuleType(module)
    made.__dict__.update(members)
    put(module, made)


class InertKind(type):
    def __getattr__(cls, name):
        return inert(name)


class Inert(metaclass=InertKind):
    """A member of an absent package. It can be a base, an annotation, a decorator, or be called; it does nothing."""

    def __init__(self, *_, **__):
        pass

    def __class_getitem__(cls, _):
        return cls

    def __call__(self, *given, **__):
        return given[0] if given else self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def inert(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return InertKind(name, (Inert,), {})


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives empty modules for the named packages, and for what is in them, so that they can be imported."""

    def __init__(self, *names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if any(f"{name}.".startswith(f"{absent}.") for absent in self.names):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.__getattr__ = inert


def absent(*names):
    # First, so that a test does the same whether or not a package is installed.
    sys.meta_path.insert(0, Absent(*names))


class Stream:
    """A stream of no GPU: everything has happened when a call returns."""

    def __init__(self, *_, **__):
        self.cuda_stream = 0

    def synchronize(self):
        pass


class Logger(logging.Logger):
    """vLLM's loggers also have methods that say a thing once."""

    debug_once, info_once, warning_once = logging.Logger.debug, logging.Logger.info, logging.Logger.warning


class Platform:
    """vLLM's current_platform, as far as its NCCL asks."""

    is_rocm = staticmethod(lambda: False)
    is_cuda_alike = staticmethod(lambda: True)
    fp8_dtype = staticmethod(lambda: torch.float8_e4m3fn)


class Store:
    """StatelessProcessGroup: what a rendezvous needs to know."""

    def __init__(self, host, port, rank, world_size):
        self.host, self.port, self.rank, self.world_size = host, port, rank, world_size
        self.store = self.socket = None

    @classmethod
    def create(cls, host, port, rank, world_size, **_):
        return cls(host, port, rank, world_size)


class Communicator:
    """PyNcclCommunicator over gloo, in the group that refit joins with "backend": "gloo"."""

    name = "weight_transfer"

    def __init__(self, group, device=None, **_):
        self.group, self.rank, self.world_size = group, group.rank, group.world_size
        self.sent = []
        self.gloo = init_custom_process_group(
            "gloo", f"tcp://{group.host}:{group.port}", group.world_size, group.rank, self.name, TIMEOUT
        )

    def broadcast(self, tensor, src, stream=None):
        self.sent.append(tensor.numel() * tensor.element_size())
        dist.broadcast(tensor, src, group=self.gloo)

    def destroy(self):
        if self.gloo is not None:
            dist.destroy_process_group(self.gloo)
            self.gloo = None


def vllm(on_gpu=False):
    """vLLM's weight transfer, as a trainer imports it. `on_gpu`: torch's CUDA and vLLM's NCCL are the real ones."""
    bare("vllm", "vllm", "vllm.config", "vllm.distributed", "vllm.distributed.device_communicators", "vllm.utils")
    replace("pybase64", **vars(base64))
    replace("vllm.config.parallel", ParallelConfig=object)
    replace("vllm.config.weight_transfer", WeightTransferConfig=object)
    replace("vllm.utils.network_utils", get_ip=lambda: "127.0.0.1", get_open_port=free_port)
    replace("vllm.logger", init_logger=Logger)
    if on_gpu:
        replace("vllm.platforms", current_platform=Platform())
        replace("vllm.utils.torch_utils", current_stream=torch.cuda.current_stream)
        replace("vllm.utils.system_utils", suppress_stdout=contextlib.nullcontext)
        sys.modules["vllm.utils.network_utils"].get_tcp_uri = lambda host, port: f"tcp://{host}:{port}"
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

        # vLLM disables its group if one function is missing. These came with NCCL 2.29.7, and updates do not use them.
        newer = ("ncclCommSuspend", "ncclCommResume")
        NCCLLibrary.exported_functions = [one for one in NCCLLibrary.exported_functions if one.name not in newer]
        return
    gloo_for_nccl()
    torch.cuda.Stream = Stream
    torch.cuda.stream = contextlib.nullcontext
    torch.cuda.current_stream = Stream
    torch.cuda.set_device = lambda _: None
    torch.accelerator.current_device_index = lambda: 0


def gloo_for_nccl():
    replace("vllm.distributed.device_communicators.pynccl_wrapper", NCCL_UNIQUE_ID_BYTES=128)
    replace("vllm.distributed.device_communicators.pynccl", PyNcclCommunicator=Communicator)
    replace("vllm.distributed.utils", StatelessProcessGroup=Store)
    replace("vllm.utils.nccl", unpinned_nccl_env=contextlib.nullcontext)


def trl():
    """TRL's clients for a vLLM server."""
    # transformers looks for the real accelerate when it is imported.
    import transformers  # noqa: F401

    vllm()
    bare("trl", "trl", "trl.generation", "trl.experimental", "trl.experimental.async_grpo")
    replace("accelerate")
    replace("accelerate.logging", get_logger=logging.getLogger)


def trl_trainer():
    """TRL's asynchronous GRPO: its trainer and its rollout loop. Their base classes are stand-ins."""
    # accelerate and peft are the real ones, and look for what is really installed.
    import accelerate  # noqa: F401
    import peft  # noqa: F401
    import transformers.trainer  # noqa: F401

    vllm()
    bare("trl", "trl", "trl.generation", "trl.experimental", "trl.experimental.async_grpo")
    absent("datasets", "jinja2", "jmespath", "pandas", "pyarrow", "rich", "trackio", "wandb")
    absent(*(f"trl.{name}" for name in ("chat_template_utils", "data_utils", "models", "rewards", "trainer")))
    replace("trl.trainer.base_config", _BaseConfig=type("BaseConfig", (), dict(_VALID_DICT_FIELDS=[])))
    replace("trl.trainer.base_trainer", _BaseTrainer=object)


def areal():
    """AReaL's client of its inference servers, its two backends, and its FSDP trainer."""
    # transformers looks for what is really installed when it is imported.
    import transformers  # noqa: F401

    models = ("models", "models.fsdp", "models.transformers", "models.tree_attn")
    bare("areal", "areal", *(f"areal.{name}" for name in ("engine", "experimental", "infra", "utils", *models)))
    absent("PIL", "aiofiles", "einops", "httpx", "hydra", "lark", "numba", "omegaconf", "orjson", "peft", "torchdata")
    absent("areal.engine.fsdp_utils.optimizer")
    replace("areal.utils.logging", **{**vars(logging), "LOG_PREFIX_WIDTH": 10})
    replace("pybase64", **vars(base64))
    replace("uvloop", run=asyncio.run, install=lambda: None)


def sglang():
    """SGLang's client of its HTTP server, and how it serializes tensors. The arguments of the server are a stand-in."""
    bare("sglang", "sglang", "sglang.srt", "sglang.srt.entrypoints", "sglang.srt.utils", "sglang.srt.weight_sync")
    absent("PIL", "orjson", "psutil", "starlette", "triton")
    absent(*(f"sglang.srt.{name}" for name in ("environ", "observability", "platforms", "runtime_context")))
    absent("sglang.srt.utils.msgspec_utils", "sglang.srt.utils.video_decoder")
    replace("pybase64", **vars(base64))
    from sglang.srt.utils import common

    sys.modules["sglang.srt.utils"].__dict__.update(
        MultiprocessingSerializer=common.MultiprocessingSerializer, kill_process_tree=common.kill_process_tree
    )
    replace("sglang.srt.arg_groups")
    replace("sglang.srt.arg_groups.overrides", resolving_view=lambda args: args)
    replace("sglang.srt.arg_groups.serving_hook", ssl_verify_of=lambda _: True)
    replace("sglang.srt.entrypoints.http_server", launch_server=None)
    replace("sglang.srt.server_args", ServerArgs=ServerArgs)


class ServerArgs(types.SimpleNamespace):
    """The arguments of a server, as far as the client reads them."""

    host = port = None

    def __init__(self, url, tp_size):
        super().__init__(url=lambda: url, tp_size=tp_size)


def openrlhf():
    """OpenRLHF's trainers and its generator of samples. Ray is absent too: the test has actors of its own."""
    import transformers  # noqa: F401

    vllm()
    sys.modules["vllm"].SamplingParams = types.SimpleNamespace
    sys.modules["vllm.utils"].random_uuid = str
    replace("vllm.inputs", TokensPrompt=dict)
    # refit_openrlhf passes OpenRLHF's name of the group on when it is gloo's.
    Communicator.name = "openrlhf"
    bare("openrlhf", "openrlhf", "openrlhf.trainer", "openrlhf.trainer.ray")
    absent("PIL", "accelerate", "bitsandbytes", "datasets", "deepspeed", "einops", "flash_attn", "loralib", "optree")
    absent("optimum", "peft", "pylatexenc", "ray", "torchdata")
    torch.cuda.current_device = lambda: 0
    torch.cuda.synchronize = lambda: None


def free_port():
    from distributed_group import free_port

    return free_port()
