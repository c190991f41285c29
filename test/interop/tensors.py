"""How trainers send CPU tensors: position-coded weights, torch's pickled handles, and ways to find leaks."""

import base64
import dataclasses
import functools
import gc
import glob
import io
import json
import os
import pathlib
import re
import sys
import urllib.error
import urllib.request
from multiprocessing.reduction import ForkingPickler

import safetensors
import torch
import torch.multiprocessing
import transformers

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "test/gpu"))
from tensor_weights import checksums_of, coded  # noqa: E402

torch.multiprocessing.set_sharing_strategy("file_system")
torch.set_num_threads(1)


def freeze_imports():
    """Excludes what has been imported from garbage collection: tests collect often, and torch's objects take 0.3 s.

    While modules are loaded, collections find nothing: `gc.disable()` before saves a fifth of the time of an import.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


# The code in docs/checksum.md, as a reader would copy it.
code = {}
for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs/checksum.md").read_text(), re.S):
    exec(block, code)

# Stand-ins for classes of SGLang. Servers know them by name.


@dataclasses.dataclass
class FlattenedTensorMetadata:
    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


@dataclasses.dataclass
class LocalSerializedTensor:
    values: list


def patient(share):
    """On a busy machine torch's manager of shared memory may be silent for longer than the second that torch waits."""

    @functools.wraps(share)
    def shared(*args, **kwargs):
        for left in reversed(range(30)):
            try:
                return share(*args, **kwargs)
            except RuntimeError as error:
                if left == 0 or "Shared memory manager" not in str(error):
                    raise

    return shared


torch.UntypedStorage._share_filename_cpu_ = patient(torch.UntypedStorage._share_filename_cpu_)


def dumps(obj):
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(obj)
    return buffer.getvalue()


def serialize(obj):
    return base64.b64encode(dumps(obj)).decode()


def bucket(named):
    """SGLang's FlattenedTensorBucket: the bytes of all tensors one after another, without alignment."""
    flat = [tensor.contiguous().flatten().view(torch.uint8) for _, tensor in named]
    metadata, at = [], 0
    for (name, tensor), piece in zip(named, flat):
        metadata.append(
            FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, at, at + piece.numel(), piece.numel())
        )
        at += piece.numel()
    return {"flattened_tensor": torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8), "metadata": metadata}


def checksum(tensor):
    return code["checksum"](tensor.to(torch.bfloat16).contiguous().view(torch.int16).numpy())


@functools.cache
def coded_checksum(variant, name, shape):
    """The checksum of `coded`, computed once. `shape`: a tuple."""
    return checksums_of([(name, coded(variant, name, shape))])[name]


COMMON = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=320,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
)
MODELS = {
    "llama": lambda **more: transformers.LlamaConfig(**COMMON | more, head_dim=16),
    "qwen2": lambda **more: transformers.Qwen2Config(**COMMON | more, tie_word_embeddings=True),
    "qwen3": lambda **more: transformers.Qwen3Config(**COMMON | more, head_dim=32),
    "qwen3-moe": lambda **more: transformers.Qwen3MoeConfig(
        **COMMON | more, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        norm_topk_prob=True,
    ),
}  # fmt: skip


def config_of(kind):
    """The config of a kind of MODELS; "qwen3-deep" has four layers, for pipelines."""
    plain = kind.removesuffix("-deep")
    return MODELS[kind]() if plain == kind else MODELS[plain](num_hidden_layers=4)


class Model:
    """A tiny checkpoint of a kind of MODELS, and its tensors by name."""

    def __init__(self, kind, folder):
        self.folder = pathlib.Path(folder)
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(config_of(kind))
        model.to(torch.bfloat16).save_pretrained(folder)
        freeze_imports()
        self.shapes = {}
        for file in self.folder.glob("*.safetensors"):
            with safetensors.safe_open(file, "pt") as opened:
                for name in opened.keys():
                    self.shapes[name] = tuple(opened.get_slice(name).get_shape())

    def tensors(self, variant):
        return [(name, coded(variant, name, shape)) for name, shape in self.shapes.items()]

    def checksums(self, variant):
        return {name: coded_checksum(variant, name, tuple(shape)) for name, shape in self.shapes.items()}


class Refused(Exception):
    def __init__(self, status, body):
        super().__init__(f"{status}: {body}")
        self.status = status
        self.body = body


def post(server, path, body):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=300) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        raise Refused(error.code, json.load(error)) from None


def update(server, entries, **fields):
    return post(server, "/update_weights_from_tensor", {"serialized_named_tensors": entries, **fields})


def checksums(server):
    return post(server, "/weights_checker", {})["checksums"]


def metric(server, name):
    with urllib.request.urlopen(server.url + "/metrics") as reply:
        return float(re.search(rf"^refit:{name}(?:{{.*?}})? (\S+)$", reply.read().decode(), re.M)[1])


def shared_files(pid=None):
    return sorted(glob.glob(f"/dev/shm/torch_{os.getpid() if pid is None else pid}_*"))


def remove_shared_files():
    """For receivers that were killed: they returned no references, so torch keeps the files until this process ends."""
    for path in shared_files():
        os.unlink(path)


def file_count(path):
    """The reference count at the start of a shared memory file."""
    with open(path, "rb") as file:
        return int.from_bytes(file.read(4), "little", signed=True)


def descriptors(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


def resident(pid):
    return int(re.search(r"VmRSS:\s+(\d+)", pathlib.Path(f"/proc/{pid}/status").read_text())[1]) * 1024


def mappings(pid):
    """How many mappings of shared memory files a process has. Those of the allocator come and go with its threads."""
    return pathlib.Path(f"/proc/{pid}/maps").read_text().count(" /dev/shm/")


def threads(pid):
    return len(os.listdir(f"/proc/{pid}/task"))
