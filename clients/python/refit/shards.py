"""The shards of tensors that each rank of a trainer holds, described without gathering them."""

import copy
import hashlib
import json
from dataclasses import dataclass, field

from .tensors import WRAPPERS, dtype_name


@dataclass
class Shard:
    """This rank's part of one parameter.

    shape: of the whole parameter. layout: as in an announcement (docs/shards.md). local: the elements that this rank
    holds, in the layout's order; None if it holds none. into: [(name in checkpoints, rows)] for fused rows.
    padded: it has more rows than the model's tensor."""

    name: str
    shape: tuple
    layout: dict
    local: object
    into: list = field(default=None)
    padded: bool = False

    def announced(self, dtype):
        out = dict(name=self.name, shape=list(self.shape), dtype=dtype_name(dtype or self.local.dtype))
        if self.into is not None:
            out["into"] = [dict(name=name, rows=rows) for name, rows in self.into]
        if self.padded:
            out["padded"] = True
        return out


def shards_of(weights, ranks, layout=None):
    """The shards of this rank: a list of Shard.

    weights: a module, a state dict or (name, tensor) pairs with DTensors (FSDP2, tensor parallel), ShardedTensors
    (FSDP1's SHARDED_STATE_DICT) or plain tensors, which every rank that adds them holds whole; a module of FSDP1 (its
    flat parameters); a list of Shard, for layouts of one's own; or, with layout="megatron", a Megatron-core model or
    the list of its chunks."""
    if layout == "megatron":
        from .megatron import megatron_shards

        return megatron_shards(weights, ranks)
    if layout is not None:
        raise ValueError(f"layout: expected None or 'megatron', got {layout!r}")
    if hasattr(weights, "state_dict"):
        from .fsdp1 import flat_modules, flat_shards

        flat = flat_modules(weights)
        if flat:
            return flat_shards(weights, flat, ranks)
        weights = state_of(weights)
    if isinstance(weights, list) and all(isinstance(one, Shard) for one in weights):
        return weights
    import torch

    pairs = weights.items() if hasattr(weights, "items") else weights
    layouts = {}
    # Without gradients, which to_local() would track.
    with torch.no_grad():
        return [shard_of(name, tensor, ranks, layouts) for name, tensor in pairs]


def state_of(model):
    """The state dict by names in checkpoints, without a tied head.

    named_parameters() would show whole tensors where FSDP2 has not resharded after a forward pass; state_dict() never
    does."""
    tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    state = {}
    for name, tensor in model.state_dict().items():
        name = WRAPPERS.sub("", name)
        name = name[7:] if name.startswith("module.") else name
        if "lora_" in name:
            raise ValueError(f"{name}: it belongs to an adapter; send the model after merge_and_unload()")
        if not (tied and name == "lm_head.weight"):
            state[name] = tensor
    return state


def shard_of(name, tensor, ranks, layouts):
    """`layouts`: those of the DTensors before it, by mesh and placements. torch takes long to say which ranks a mesh
    has. Called without gradients."""
    import torch

    if hasattr(tensor, "device_mesh"):
        key = tensor.device_mesh, tensor.placements
        if key not in layouts:
            layouts[key] = mesh_layout(name, tensor, ranks)
        local = tensor.to_local()
        # A view of each of many parameters takes as long as everything else here.
        is_plain = type(local) is torch.Tensor and not local.requires_grad
        return Shard(name, tuple(tensor.shape), layouts[key], local if is_plain else local.detach())
    tensor = tensor.detach() if hasattr(tensor, "detach") else tensor
    if hasattr(tensor, "local_shards"):
        return sharded_tensor(name, tensor, ranks)
    return Shard(name, tuple(tensor.shape), whole_layout(ranks), tensor)


def whole_layout(ranks):
    """This rank holds all of it. Ranks that announce the same are copies of one another."""
    return dict(mesh=dict(shape=[1], ranks=[ranks.rank]), placements=["replicate"])


def mesh_layout(name, tensor, ranks):
    """The mesh and placements of a DTensor, with ranks of the update's process group.

    torch's own offsets of a local tensor are no help: for shards whose rows are not neighbours they are wrong."""
    mesh = tensor.device_mesh.mesh
    own = [ranks.number_of(rank) for rank in mesh.flatten().tolist()]
    return dict(
        mesh=dict(shape=list(mesh.shape), ranks=own),
        placements=[placement_of(name, placement) for placement in tensor.placements],
    )


def placement_of(name, placement):
    kind = type(placement).__name__
    if kind == "Replicate":
        return "replicate"
    if kind == "Shard":
        return dict(shard=placement.dim)
    if kind == "_StridedShard":
        return dict(shard=placement.dim, split=placement.split_factor)
    raise ValueError(f"{name}: its placement is {placement}; a rank holds no copy of such a tensor, so redistribute it")


def sharded_tensor(name, tensor, ranks):
    """FSDP1's SHARDED_STATE_DICT, and torch.distributed.checkpoint's view of it."""
    parts = tensor.local_shards()
    boxes = [
        dict(rank=ranks.rank, offset=list(part.metadata.shard_offsets), shape=list(part.metadata.shard_sizes))
        for part in parts
    ]
    local = joined([part.tensor for part in parts])
    return Shard(name, tuple(tensor.size()), dict(boxes=boxes), local)


def checkpoint_shards(metadata, tensors, ranks):
    """The shards of a state dict that torch.distributed.checkpoint describes.

    metadata: {name: TensorStorageMetadata}, as in Metadata.state_dict_metadata. tensors: {name: [(offsets, tensor)]},
    the chunks that this rank holds."""
    out = []
    for name, chunks in tensors.items():
        whole = metadata[name]
        known = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in whole.chunks}
        boxes = []
        for offsets, tensor in chunks:
            if known.get(tuple(offsets)) != tuple(tensor.shape):
                raise ValueError(f"{name}: the metadata has no chunk of {tuple(tensor.shape)} at {tuple(offsets)}")
            boxes.append(dict(rank=ranks.rank, offset=list(offsets), shape=list(tensor.shape)))
        local = joined([tensor.detach() for _, tensor in chunks])
        out.append(Shard(name, tuple(whole.size), dict(boxes=boxes), local))
    return out


def joined(tensors):
    """Several pieces of one rank lie one after another."""
    import torch

    if not tensors:
        return None
    return tensors[0].detach() if len(tensors) == 1 else torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


class Announcements:
    """Makes the announcement of all ranks' shards, and remembers the last ones: when a rank announces what it has
    announced before, ranks only compare digests."""

    MOST = 8

    def __init__(self):
        # By digest of this rank's list: the digests of all ranks, the announcement, its digest; and the list itself.
        self.known, self.lists = {}, {}

    def of(self, shards, ranks, dtype=None, **fields):
        """The announcement and its digest, on every rank."""
        shards = [shard for shard in shards if shard.local is not None]
        own = described(shards, dtype), fields
        # Comparing the lists takes a fraction of the time of writing one as JSON.
        digest, text = next((digest for digest, known in self.lists.items() if known == own), None), None
        if digest is None:
            text = text_of(shards, dtype)
            digest = digest_of([text, fields])
        known = self.known.pop(digest, (None, None, None))
        told = ranks.gather((digest, known[0]))
        digests = [own for own, _ in told]
        # All ranks remember the same, or all exchange their lists.
        if any(remembered != digests for _, remembered in told):
            announced = announcement(text or text_of(shards, dtype), digests, ranks, fields)
            known = digests, announced, digest_of(announced)
        self.known[digest] = known
        if digest not in self.lists:
            # A copy: the caller may change the layouts that it gave.
            self.lists[digest] = copy.deepcopy(own)
        while len(self.known) > self.MOST:
            oldest = next(iter(self.known))
            self.known.pop(oldest)
            self.lists.pop(oldest)
        return known[1:]


def described(shards, dtype):
    """All that the announcement of a rank's shards depends on, to be compared."""
    places, layouts, out = {}, [], []
    for shard in shards:
        # Most shards have the same layout.
        place = places.get(id(shard.layout))
        if place is None:
            place = places[id(shard.layout)] = len(layouts)
            layouts.append(shard.layout)
        out.append((shard.name, shard.shape, dtype or shard.local.dtype, place, shard.into, shard.padded))
    return out, layouts


def text_of(shards, dtype):
    return json.dumps([(shard.announced(dtype), shard.layout) for shard in shards], sort_keys=True)


def digest_of(value):
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def announcement(text, digests, ranks, fields):
    # Each list is sent once, however many ranks have it.
    lists = ranks.gather(text if digests.index(digests[ranks.rank]) == ranks.rank else None)
    found = {}
    for text in filter(None, lists):
        for announced, layout in json.loads(text):
            known = found.setdefault(announced["name"], (announced, []))
            if known[0] != announced:
                raise ValueError(f"{announced['name']}: ranks disagree about it: {known[0]} and {announced}")
            if layout not in known[1]:
                known[1].append(layout)
    layouts, tensors = {}, []
    for announced, own in found.values():
        layout = json.dumps(own[0] if len(own) == 1 else merged(announced["name"], own))
        tensors.append(dict(announced, layout=layouts.setdefault(layout, len(layouts))))
    return dict(
        format="refit.shards/1",
        world=ranks.size,
        layouts=[json.loads(layout) for layout in layouts],
        tensors=tensors,
        **fields,
    )


def merged(name, layouts):
    """One layout of those that different ranks announce: parts of it, or copies of the whole."""
    for kind in ("boxes", "flat"):
        if all(kind in layout for layout in layouts):
            return {kind: [part for layout in layouts for part in layout[kind]]}
    first = layouts[0]
    for layout in layouts:
        if layout.get("placements") != first.get("placements") or layout["mesh"]["shape"] != first["mesh"]["shape"]:
            raise ValueError(f"{name}: ranks announce it in layouts that do not fit together: {first} and {layout}")
    ranks = [rank for layout in layouts for rank in layout["mesh"]["ranks"]]
    return dict(
        mesh=dict(shape=[len(layouts), *first["mesh"]["shape"]], ranks=ranks),
        placements=["replicate", *first["placements"]],
    )
