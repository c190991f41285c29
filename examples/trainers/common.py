"""Shared by the example trainers: a model that is sharded over processes (FSDP2, on CPUs or GPUs), a step of training,
and requests to a server."""

import argparse
import base64
import io
import json
import os
import sys
import urllib.error
import urllib.request
from multiprocessing.reduction import ForkingPickler

import torch
import torch.distributed as dist
import torch.multiprocessing
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

# The server is not a child of this process, so tensors are shared by file name, not by descriptor.
torch.multiprocessing.set_sharing_strategy("file_system")


def arguments(description, add=None):
    """`add(parser)` adds a trainer's own options."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--model", default="models/adder-base", help="the folder that the server loaded")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: a GPU for each process")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--bucket-mb", type=float, default=512)
    parser.add_argument("--save", help="folder for the trainer's own weights after the last step")
    if add is not None:
        add(parser)
    return parser.parse_args()


def post(url, path, body):
    headers = {"content-type": "application/json"}
    if "REFIT_API_KEY" in os.environ:
        headers["authorization"] = "Bearer " + os.environ["REFIT_API_KEY"]
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, json.dumps(body).encode(), headers)) as reply:
            text = reply.read().decode()
            return json.loads(text) if "json" in reply.headers.get("content-type", "") else text
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{url}{path}: {error.code}: {error.read().decode(errors='replace')}") from None


def ranks_of(url):
    """Tensor-parallel ranks of the server."""
    with urllib.request.urlopen(url + "/server_info") as reply:
        return json.load(reply)["tp_size"]


def pickled(obj):
    """As SGLang's MultiprocessingSerializer: handles instead of data."""
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(obj)
    return buffer.getvalue()


def text(data):
    return base64.b64encode(data).decode()


def sharded_model(folder, device="cpu"):
    torch.set_num_threads(1)
    place, backend = torch.device("cpu"), "gloo"
    if device == "cuda":
        count = torch.cuda.device_count()
        if count == 0:
            sys.exit("--device cuda: torch sees no GPU")
        if int(os.environ["LOCAL_WORLD_SIZE"]) > count:
            sys.exit(
                f"--device cuda: {os.environ['LOCAL_WORLD_SIZE']} processes need a GPU each (NCCL refuses to share "
                f"one), and torch sees {count}"
            )
        place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(place)
        # Python's objects travel by gloo.
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(place)
    mesh = DeviceMesh.from_group(dist.group.WORLD, place.type)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train_step(model, step, rate=0.05):
    """A step on the likelihood of made-up text, of another part of it on every process."""
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    ids = torch.randint(3, model.config.vocab_size, (2, 32), generator=generator).to(next(model.parameters()).device)
    model(ids, labels=ids).loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= rate * parameter.grad
            parameter.grad = None


def full_tensors(model):
    """Names and whole tensors, one at a time. All processes take part in gathering each, so all must walk through to
    the end."""
    tied = model.config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def buckets(named, limit):
    """Lists of tensors of at most `limit` bytes; a larger tensor is alone."""
    bucket, size = [], 0
    for name, tensor in named:
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def gather(mine, ranks):
    """Gathers the objects of the first `ranks` processes on the first of them."""
    gathered = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, gathered)
    return gathered[:ranks] if gathered is not None else None


def answered():
    """Waits until the server has answered, so no rank frees shared tensors earlier. Then torch can reuse the memory
    whose references the server has released."""
    dist.barrier()
    if torch.cuda.is_initialized():
        torch.cuda.ipc_collect()


def save(model, folder):
    tensors = {name: tensor.detach().clone() for name, tensor in full_tensors(model)}
    if dist.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
        save_file(tensors, os.path.join(folder, "model.safetensors"))
