"""The payloads of trainers: position-coded weights, and torch's pickles of handles in every form that a trainer sends.

It needs no server; the sending processes import torch and this.
"""

import base64
import dataclasses
import io
import math
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing
from torch.multiprocessing import reductions

from tensor_weights import checksum_of, checksums_of, coded, signed  # noqa: F401

# A server is not a child of the sender, so CPU tensors are shared by file name.
torch.multiprocessing.set_sharing_strategy("file_system")

# Replacements of SGLang's classes; servers recognise them by name.


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


def _rebuild_cuda_tensor_modified(*args):
    """SGLang's name for rebuild_cuda_tensor with a UUID instead of torch's index. Only the name is pickled."""
    index = next(i for i in range(torch.cuda.device_count()) if uuid_of(i) == args[6])
    return reductions.rebuild_cuda_tensor(*args[:6], index, *args[7:])


def uuid_of(index):
    return str(torch.cuda.get_device_properties(index).uuid)


class Shares:
    """Every CUDA handle that a process has made, whose reference a receiver must release."""

    def __init__(self):
        self.counters = []
        self.handles = []

    def add(self, args):
        if args[7] is not None:
            self.handles.append(args[7])
            self.counters.append((args[11].decode(), args[12]))

    def left(self):
        """{value of a handle's counter: handles}. 1: not released yet; 0: released. The file is removed with its last
        handle."""
        found, files = {}, {}
        for name, slot in self.counters:
            if name not in files:
                try:
                    with open("/dev/shm" + name, "rb") as file:
                        files[name] = file.read()
                except FileNotFoundError:
                    files[name] = None
            data = files[name]
            value = (
                "gone" if data is None else int.from_bytes(data[64 + 8 * slot : 72 + 8 * slot], "little", signed=True)
            )
            found[value] = found.get(value, 0) + 1
        return found

    def kinds(self):
        """{first bytes of a handle: number of different handles}."""
        found = {}
        for handle in set(self.handles):
            kind = (
                "64 bytes"
                if len(handle) == 64
                else f"v{handle[0]}{chr(handle[1])}{len(handle) if handle[1] == 0x65 else ''}"
            )
            found[kind] = found.get(kind, 0) + 1
        return found


SHARES = Shares()


def reducer(by_uuid):
    def reduce_tensor(tensor):
        function, args = reductions.reduce_tensor(tensor)
        if function is not reductions.rebuild_cuda_tensor:
            return function, args
        SHARES.add(args)
        return (
            (_rebuild_cuda_tensor_modified, (*args[:6], uuid_of(args[6]), *args[7:])) if by_uuid else (function, args)
        )

    return reduce_tensor


def dumps(obj, by_uuid=False):
    """Like SGLang's MultiprocessingSerializer: ForkingPickler's bytes."""
    buffer = io.BytesIO()
    pickler = ForkingPickler(buffer)
    reduce_tensor = reducer(by_uuid)
    pickler.dispatch_table = {**pickler.dispatch_table, torch.Tensor: reduce_tensor, torch.nn.Parameter: reduce_tensor}
    pickler.dump(obj)
    return buffer.getvalue()


def serialize(obj, by_uuid=False):
    return base64.b64encode(dumps(obj, by_uuid)).decode()


# Placement of a trainer's tensors.


def ordinary(variant, shapes, device):
    """Each from torch's allocator, before any other allocation."""
    named = [(name, torch.empty(shape, dtype=torch.bfloat16, device=device)) for name, shape in shapes]
    for name, tensor in named:
        coded(variant, name, tensor.shape, out=tensor)
    return named


def pooled(variant, shapes, device, pool_bytes=1 << 30, fill=True):
    """All tensors in a few large buffers, one after another, each at a multiple of 256 bytes."""
    sizes = [-(-2 * math.prod(shape) // 256) * 256 for _, shape in shapes]
    pools, places, at = [], [], 0
    room = 0
    for size in sizes:
        if size > room:
            pools.append(0)
            room = max(pool_bytes, size)
            at = 0
        places.append((len(pools) - 1, at))
        at += size
        room -= size
        pools[-1] = at
    buffers = [torch.empty(size // 2, dtype=torch.bfloat16, device=device) for size in pools]
    named = []
    for (name, shape), (pool, start) in zip(shapes, places):
        view = buffers[pool][start // 2 : start // 2 + math.prod(shape)].view(shape)
        named.append((name, coded(variant, name, shape, device, view) if fill else view))
    return named


# The content of requests: [(texts, load_format)], one entry per request.


def flatten(named, device):
    """SGLang's FlattenedTensorBucket: bytes one after another, without any alignment."""
    flat = [tensor.contiguous().flatten().view(torch.uint8) for _, tensor in named]
    metadata, at = [], 0
    for (name, tensor), piece in zip(named, flat):
        metadata.append(
            FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, at, at + piece.numel(), piece.numel())
        )
        at += piece.numel()
    return {
        "flattened_tensor": torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8, device=device),
        "metadata": metadata,
    }


def by_bytes(named, limit):
    bucket, size = [], 0
    for name, tensor in named:
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def engine_shards(config, weights, ranks, rank):
    """This rank's parameters as SGLang's models name and shape them: q, k, v and gate, up fused; rows or columns of a
    rank."""

    def rows(name):
        return weights[name].chunk(ranks, 0)[rank]

    def columns(name):
        return weights[name].chunk(ranks, 1)[rank]

    def vocabulary(name):
        whole = weights[name]
        padded = torch.zeros(-(-whole.shape[0] // 64) * 64, whole.shape[1], dtype=whole.dtype, device=whole.device)
        padded[: whole.shape[0]] = whole
        return padded.chunk(ranks, 0)[rank]

    own = {name: vocabulary(name) if name in ("model.embed_tokens.weight", "lm_head.weight") else tensor
           for name, tensor in weights.items() if ".layers." not in name}  # fmt: skip
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        attention, mlp = at + "self_attn.", at + "mlp."
        own.update(
            (name, tensor)
            for name, tensor in weights.items()
            if name.startswith(at) and ("norm" in name or name == mlp + "gate.weight")
        )
        for end in ["weight", "bias"]:
            if attention + "q_proj." + end in weights:
                own[attention + "qkv_proj." + end] = torch.cat([rows(f"{attention}{p}_proj.{end}") for p in "qkv"])
        own[attention + "o_proj.weight"] = columns(attention + "o_proj.weight")
        if mlp + "gate_proj.weight" in weights:
            own[mlp + "gate_up_proj.weight"] = torch.cat([rows(mlp + "gate_proj.weight"), rows(mlp + "up_proj.weight")])
            own[mlp + "down_proj.weight"] = columns(mlp + "down_proj.weight")
        else:
            count = sum(name.startswith(mlp + "experts.") and name.endswith("up_proj.weight") for name in weights)
            experts = [f"{mlp}experts.{e}." for e in range(count)]
            own[mlp + "experts.w13_weight"] = torch.stack(
                [torch.cat([rows(e + "gate_proj.weight"), rows(e + "up_proj.weight")]) for e in experts]
            )
            own[mlp + "experts.w2_weight"] = torch.stack([columns(e + "down_proj.weight") for e in experts])
    return list(own.items())


def copied(named, device):
    """As if of another process, perhaps on another GPU."""
    return [(name, tensor.to(device, copy=True)) for name, tensor in named]


def viewed(named):
    """The same values as torch's views: transposed, stepped, inside of larger ones, parameters, of float32."""
    found = []
    for number, (name, tensor) in enumerate(named):
        match number % 5:
            case 0 if tensor.dim() == 2:
                tensor = tensor.t().contiguous().t()
            case 1:
                padded = torch.full(
                    (*tensor.shape[:-1], tensor.shape[-1] * 3), float("nan"), dtype=tensor.dtype, device=tensor.device
                )
                padded[..., ::3] = tensor
                tensor = padded[..., ::3]
            case 2:
                around = torch.full(
                    [size + 5 for size in tensor.shape], float("nan"), dtype=tensor.dtype, device=tensor.device
                )
                inside = around[tuple(slice(2, 2 + size) for size in tensor.shape)]
                inside.copy_(tensor)
                tensor = inside
            case 3:
                tensor = torch.nn.Parameter(tensor)
            case _:
                tensor = tensor.float()
        found.append((name, tensor))
    return found


def as_tuple(tensor):
    """(function, args) without a call, as trainers for vLLM send handles."""
    return reducer(False)(tensor)


class Packer:
    """`devices`: the GPU of each rank's process. `held` keeps the objects that must outlive the reply."""

    def __init__(self, config, devices):
        self.config, self.devices, self.held = config, devices, []

    def pack(self, way, named, ranks):
        self.held = []
        cards = [self.devices[rank % len(self.devices)] for rank in range(ranks)]
        match way:
            case "list":
                return [([serialize(named)], None)]
            case "list-by-uuid":
                return [([serialize(named, by_uuid=True)] * ranks, None)]
            case "list-per-rank":
                # Each rank gets the memory of a process of its own; the second lies on another GPU if there is one.
                self.held = [copied(named, card) for card in cards]
                return [([serialize(own, by_uuid=True) for own in self.held], None)]
            case "parts-per-rank":
                return [([serialize(named[rank::ranks]) for rank in range(ranks)], None)]
            case "verl":
                self.held = [copied(named, card) for card in cards]
                local = [
                    (own[0][0], LocalSerializedTensor([dumps(tensor) for _, tensor in own])) for own in zip(*self.held)
                ]
                return [([serialize(local)] * ranks, None)]
            case "verl-one-by-one":
                return [
                    ([serialize([(name, LocalSerializedTensor([dumps(tensor)] * ranks))])] * ranks, None)
                    for name, tensor in named
                ]
            case "bucket":
                self.held = [flatten(named, named[0][1].device)]
                return [([serialize(self.held[0], by_uuid=True)] * ranks, "flattened_bucket")]
            case "buckets" | "large-buckets":
                self.held = [
                    flatten(bucket, named[0][1].device)
                    for bucket in by_bytes(named, 40_000 if way == "buckets" else 512_000_000)
                ]
                return [([serialize(bucket)] * ranks, "flattened_bucket") for bucket in self.held]
            case "direct":
                self.held = [
                    engine_shards(self.config, dict(copied(named, card)), ranks, rank)
                    for rank, card in enumerate(cards)
                ]
                return [([serialize(own, by_uuid=True) for own in self.held], "direct")]
            case "views":
                self.held = viewed(named)
                return [([serialize(self.held)], None)]
            case "tuples":
                return [([serialize([(name, as_tuple(tensor)) for name, tensor in named])] * ranks, None)]
            case "cpu":
                self.held = copied(named, "cpu")
                return [([serialize(self.held)], None)]
            case "mixed":
                self.held = [
                    (name, tensor.cpu() if number % 2 else tensor) for number, (name, tensor) in enumerate(named)
                ]
                return [([serialize(self.held)], None)]
            case "mixed-ranks":
                self.held = copied(named, "cpu")
                return [([serialize(named)] + [serialize(self.held)] * (ranks - 1), None)]
        raise ValueError(way)


WAYS = [
    "list",
    "list-by-uuid",
    "list-per-rank",
    "parts-per-rank",
    "verl",
    "verl-one-by-one",
    "bucket",
    "buckets",
    "direct",
    "views",
    "cpu",
]
CARD_WAYS = ["tuples", "mixed", "mixed-ranks"]
