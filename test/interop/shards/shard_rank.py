"""One rank of a sharded trainer in torch, on gloo. sharded.py sends it one command a line; each is a function below.

Every rank runs the same commands. State stays from command to command."""

import faulthandler
import gc
import json
import os
import pathlib
import re
import signal
import sys
import time
import traceback
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[3]
FOLDERS = ["test/interop/shards", "clients/python", "test/interop", "test/gpu", "test/trainers"]
sys.path[:0] = [str(ROOT / folder) for folder in FOLDERS]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: E402

import refit  # noqa: E402
from tensor_weights import coded  # noqa: E402
from tensors import config_of  # noqa: E402

torch.set_num_threads(1)
# A process that forks ranks imports this file, too, and is none of them.
rank, world = int(os.environ.get("RANK", -1)), int(os.environ.get("WORLD_SIZE", 0))
state = {}


def peak_growth(run):
    """Bytes by which the resident memory of this process has grown at most while it ran."""

    def status(field):
        text = pathlib.Path("/proc/self/status").read_text()
        return int(text.split(field + ":")[1].split()[0]) * 1024

    gc.collect()
    # Resets the highest mark.
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    run()
    return status("VmHWM") - before


def shapes_of(folder):
    import safetensors

    shapes = {}
    for file in pathlib.Path(folder).glob("*.safetensors"):
        with safetensors.safe_open(file, "pt") as opened:
            for name in opened.keys():
                shapes[name] = tuple(opened.get_slice(name).get_shape())
    return shapes


def full_state(names, variant):
    """Coded tensors by the names of a model in memory: transformers 5 fuses experts."""
    shapes, out = state["shapes"], {}
    for name in names:
        if name in shapes:
            out[name] = coded(variant, name, shapes[name])
        elif name.endswith("experts.gate_up_proj"):
            base = name[: -len("gate_up_proj")]
            count = sum(1 for other in shapes if other.startswith(base) and other.endswith(".gate_proj.weight"))
            parts = [
                [f"{base}{e}.{part}_proj.weight" for part in ("gate", "up")]
                for e in range(count)
            ]
            each = [torch.cat([coded(variant, one, shapes[one]) for one in part]) for part in parts]
            out[name] = torch.stack(each)
        elif name.endswith("experts.down_proj"):
            base = name[: -len("down_proj")]
            count = sum(1 for other in shapes if other.startswith(base) and other.endswith(".down_proj.weight"))
            each = [f"{base}{e}.down_proj.weight" for e in range(count)]
            out[name] = torch.stack([coded(variant, one, shapes[one]) for one in each])
        elif name != "lm_head.weight":
            raise KeyError(name)
    return out


def setup(kind, folder, mesh, ranks=None, dims=None, dtype="bfloat16"):
    """A model of transformers under FSDP2; mesh 2-D with dims ["dp", "tp"] or ["replicate", "shard"]."""
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM

    state.clear()
    state["shapes"] = shapes_of(folder)
    own = list(range(world)) if ranks is None else ranks
    state["group"] = dist.new_group(own) if ranks is not None else dist.group.WORLD
    state["member"] = rank in own
    device_mesh = DeviceMesh("cpu", torch.tensor(own).view(*mesh), mesh_dim_names=tuple(dims) if dims else None)
    if not state["member"]:
        return
    torch.manual_seed(0)
    if kind.startswith("@"):
        config = AutoConfig.from_pretrained(kind[1:])
    else:
        config = config_of(kind)
    model = AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype))
    dp = device_mesh
    if dims == ["dp", "tp"]:
        tensor_parallel(model, device_mesh["tp"])
        dp = device_mesh["dp"]
    for layer in model.model.layers:
        fully_shard(layer, mesh=dp)
    fully_shard(model, mesh=dp)
    state["model"] = model


def tensor_parallel(model, mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {f"self_attn.{part}_proj": ColwiseParallel() for part in "qkv"}
    plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    plan |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)


def placements():
    """The kinds of placements of the model's parameters."""
    if not state["member"]:
        return []
    return sorted({str(tuple(t.placements)) for t in state["model"].state_dict().values() if isinstance(t, DTensor)})


def fill(variant):
    """As a step of an optimizer would: in place."""
    if not state["member"]:
        return
    own = state["model"].state_dict()
    whole = full_state(own, variant)
    with torch.no_grad():
        for name, tensor in own.items():
            if name in whole:
                tensor.to_local().copy_(local_part(whole[name], tensor))


def local_part(whole, like):
    """The elements of this rank's shard, by taking rows of index tensors apart as torch.chunk does."""
    index = torch.arange(whole.numel()).view(whole.shape)
    mesh, coordinate = like.device_mesh, like.device_mesh.get_coordinate()
    for dim, placement in enumerate(like.placements):
        if isinstance(placement, Replicate):
            continue
        pieces = index.chunk(getattr(placement, "split_factor", 1), placement.dim)
        parts = [chunk_of(piece, placement.dim, mesh.size(dim), coordinate[dim]) for piece in pieces]
        index = torch.cat(parts, placement.dim)
    return whole.reshape(-1)[index.reshape(-1)].view(index.shape)


def chunk_of(tensor, dim, count, place):
    parts = tensor.chunk(count, dim)
    return parts[place] if place < len(parts) else tensor.narrow(dim, 0, 0)


def measured(**fields):
    """The most memory that an update takes beyond the shards."""
    return peak_growth(lambda: update(**fields))


def update(urls, version, variant=None, what="model", layout=None, group_options=None, **options):
    """Sends the shards of all ranks; returns what rank 0 has seen."""
    if not state["member"]:
        return None
    if variant is not None:
        fill(variant)
    clients = refit.Clients(urls) if len(urls) > 1 else refit.Client(urls[0])
    clients = state.setdefault(("clients", tuple(urls)), clients)
    if options.get("transport") == "group":
        key = "shard group", tuple(urls)
        if key not in state:
            state[key] = clients.shard_group(process_group=state["group"], timeout_s=60, **(group_options or {}))
        options["group"] = state[key]
    with clients.update(version=version, process_group=state["group"], **options) as made:
        made.add_sharded(state[what], layout=layout)
    return dict(tensors=made.tensors, bytes=made.bytes, outcome={url: str(o) for url, o in made.outcome.items()})


def leave():
    for key in [key for key in state if isinstance(key, tuple) and key[0] == "shard group"]:
        state.pop(key).leave()
    for key in [key for key in state if isinstance(key, tuple) and key[0] == "clients"]:
        for client in state[key].engines:
            if client.kept and rank == 0:
                client.release_kept()
            client.kept.clear()
    state.clear()
    gc.collect()
    # torch keeps the groups of models and meshes, each with a thread that wakes a hundred times a second.
    for group in [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]:
        dist.destroy_process_group(group)


def forward():
    """A pass without gradients leaves the root's parameters whole."""
    if state["member"]:
        with torch.no_grad():
            state["model"](torch.zeros(1, 4, dtype=torch.long))


def own_bytes():
    tensors = state["model"].state_dict().values()
    return sum(t.to_local().numel() * t.element_size() if isinstance(t, DTensor) else 0 for t in tensors)


def cut(names, variant, mesh, cut):
    """A state dict of DTensors: cut is [[kind, dim, split], ...], one for each dimension of the mesh."""
    from torch.distributed.tensor.placement_types import _StridedShard

    device_mesh = DeviceMesh("cpu", torch.arange(world).view(*mesh))
    kinds = [
        Replicate() if kind == "replicate" else Shard(dim) if split == 1 else _StridedShard(dim, split_factor=split)
        for kind, dim, split in cut
    ]
    state["dict"] = {}
    for name in names:
        whole = coded(variant, name, state["shapes"][name])
        local = local_part(whole, Shell(device_mesh, kinds))
        state["dict"][name] = DTensor.from_local(
            local.contiguous(), device_mesh, kinds, run_check=False, shape=whole.shape, stride=whole.stride()
        )


class Shell:
    """The part of a DTensor that says where its shard lies."""

    def __init__(self, device_mesh, placements):
        self.device_mesh, self.placements = device_mesh, placements


def megatron(kind, folder, **parallel):
    """A Megatron-core model over all ranks."""
    import megatron_rank

    state.clear()
    state.update(shapes=shapes_of(folder), group=dist.group.WORLD, member=True, config=config_of(kind))
    state["chunks"] = megatron_rank.build(state["config"], **parallel)
    return [sorted(name for name, _ in chunk.named_parameters()) for chunk in state["chunks"]]


def megatron_fill(variant):
    import megatron_rank

    grids = megatron_rank.places()
    megatron_rank.fill(state["chunks"], state["config"], state["shapes"], variant, grids)


def flat_units(folder, variant):
    """The flat parameters of FSDP1, which torch makes on accelerators alone: its own metadata, computed by its rules.

    Two units; each is flattened, padded to a multiple of the ranks, and cut in equal parts."""
    from torch.distributed.fsdp._flat_param import _ShardParamInfo

    state.clear()
    state.update(shapes=shapes_of(folder), group=dist.group.WORLD, member=True)
    model = torch.nn.Module()
    names = sorted(state["shapes"])
    for unit, own in enumerate((names[::2], names[1::2])):
        whole = torch.cat([coded(variant, name, state["shapes"][name]).reshape(-1) for name in own])
        size = -(-whole.numel() // world)
        begin, end = rank * size, (rank + 1) * size
        padded = torch.nn.functional.pad(whole, (0, size * world - whole.numel()))
        flat, infos, at = torch.nn.Parameter(padded[begin:end].clone()), [], 0
        for name in own:
            count = coded(variant, name, state["shapes"][name]).numel()
            first, last = max(begin, at), min(end, at + count)
            place = (first - begin, last - first, first - at, last - at - 1) if first < last else (None,) * 4
            infos.append(_ShardParamInfo(first < last, *place))
            at += count
        flat._fqns, flat._shapes = own, [state["shapes"][name] for name in own]
        flat._shard_param_infos = infos
        module = torch.nn.Module()
        module._flat_param = flat
        # The client drops the names of wrappers.
        model.add_module(("_fsdp_wrapped_module", "_checkpoint_wrapped_module")[unit], module)
    state["flat"] = model


def sharded_tensors(folder, variant):
    """torch's ShardedTensor, by rows, as in FSDP1's SHARDED_STATE_DICT; and the same as chunks of a checkpoint."""
    from torch.distributed._shard.sharded_tensor import Shard as Part
    from torch.distributed._shard.sharded_tensor import init_from_local_shards
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

    from refit.ranks import Ranks
    from refit.shards import checkpoint_shards

    state.clear()
    state.update(shapes=shapes_of(folder), group=dist.group.WORLD, member=True, sharded={})
    metadata, chunks = {}, {}
    for name, shape in sorted(state["shapes"].items()):
        whole = coded(variant, name, shape)
        parts = whole.chunk(world, 0)
        firsts = [sum(part.shape[0] for part in parts[:place]) for place in range(len(parts))]
        offsets = [[first, *[0] * (len(shape) - 1)] for first in firsts]
        own = [Part.from_tensor_and_offsets(parts[rank].clone(), offsets[rank], rank)] if rank < len(parts) else []
        state["sharded"][name] = init_from_local_shards(own, *shape)
        sizes = [ChunkStorageMetadata(torch.Size(o), part.shape) for o, part in zip(offsets, parts)]
        metadata[name] = TensorStorageMetadata(TensorProperties(dtype=whole.dtype), torch.Size(shape), sizes)
        chunks[name] = [(offsets[rank], parts[rank].clone())] if rank < len(parts) else []
    state["checkpoint"] = checkpoint_shards(metadata, chunks, Ranks(dist.group.WORLD))


def messages(urls):
    """Compares this rank's messages for NCCL with its blocks; returns how many lie in a shard, and how many do not."""
    from refit.blocks import Blocks, Schedule
    from refit.ranks import Ranks
    from refit.shards import shards_of

    engine = state["clients", tuple(urls)].engines[0]
    (sends,) = [value[1] for key, value in engine.plans.items() if isinstance(key, tuple)]
    announced = list(engine.announcements.known.values())[-1][1]["tensors"]
    own = {shard.name: shard.local for shard in shards_of(state["model"], Ranks(state["group"]))}
    locals, dtypes = [own[one["name"]] for one in announced], [getattr(torch, one["dtype"]) for one in announced]
    kinds = [local.dtype for local in locals]
    schedules = [Schedule(sends, dtypes, kinds, by) for by in ("blocks", "messages")]
    blocks, cut = (Blocks(schedule, locals, "cpu", 1) for schedule in schedules)
    columns, counts = list(zip(*(sends["messages"][key] for key in ("chunk", "rank", "offset", "bytes")))), [0, 0]
    for chunk in blocks.schedule.messages:
        whole, taken = blocks.pack(chunk, 0), cut.take(chunk, 0)
        wanted = [row[1:] for row in columns if row[0] == chunk]
        assert [(rank, len(part)) for rank, part in taken] == [(rank, size) for rank, _, size in wanted]
        for (_, part), (_, offset, size) in zip(taken, wanted):
            assert torch.equal(part, whole[offset : offset + size]), (chunk, offset)
        packed = sum(stretch is None for _, stretch, *_ in cut.schedule.messages[chunk])
        counts = [counts[0] + len(taken) - packed, counts[1] + packed]
    return counts


def fault(chunk, url=None):
    """This rank goes on with a chunk only after the engine has given up its update; without a url it ends there."""
    from refit.blocks import Blocks

    pack = Blocks.pack

    def faulty(self, number, turn):
        if number == chunk:
            if url is None:
                os.kill(os.getpid(), signal.SIGKILL)
            # Once.
            Blocks.pack = pack
            before, deadline = given_up(url), time.monotonic() + 60
            while given_up(url) == before:
                assert time.monotonic() < deadline, "the engine does not give up"
                time.sleep(0.1)
        return pack(self, number, turn)

    Blocks.pack = faulty


def given_up(url):
    """How many updates have failed on an engine."""
    failed = re.compile(r'refit:weight_updates_total\{.*outcome="(?:refused|torn)".*\} (\d+)')
    with urllib.request.urlopen(url + "/metrics") as reply:
        return sum(int(count) for count in failed.findall(reply.read().decode()))


def no_shared_memory():
    """This rank cannot share its next tensors, like one whose shared memory manager is too slow for torch."""
    from refit import shard_update

    pickled = shard_update.pickled

    def faulty(value):
        shard_update.pickled = pickled
        raise RuntimeError("Shared memory manager connection has timed out")

    shard_update.pickled = faulty


def forget(urls):
    """The server forgets its plans, as after a restart."""
    if rank == 0:
        for plan in state["clients", tuple(urls)].plans.values():
            if isinstance(plan, dict):
                refit.Client(urls[0]).call("DELETE", f"/shard_plans/{plan['id']}", admin=True)


if __name__ == "__main__":
    # kill -USR1 shows where a rank waits.
    faulthandler.register(signal.SIGUSR1)
    dist.init_process_group("gloo")
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"value": globals()[request.pop("command")](**request)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
            answer["code"] = getattr(error, "code", None)
        print(json.dumps(answer), flush=True)
