"""Megatron-core: the shards of tensor, pipeline and expert parallel ranks, by names in checkpoints.

A parameter's place follows from its name, its shape and the parallel groups that it belongs to:
qkv rows take turns by query group (the group's q heads, its k head, its v head), fc1 of a gated MLP holds gate and up
rows of each rank, vocabularies have rows of padding, and experts have a grid of ranks of their own."""

import re
from dataclasses import dataclass

from .shards import Shard

# Parameters behind "decoder.layers.N." that every tensor-parallel rank holds whole.
WHOLE = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
}
EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.linear_fc([12])\.weight|linear_fc([12])\.weight(\d+))$")
# State of layers that holds no weight of a checkpoint.
SKIPPED = re.compile(r"_extra_state$|mlp\.router\.expert_bias$|mlp\.router\.local_tokens_per_expert$")


@dataclass
class Grid:
    """The place of this rank in an axis: the ranks of its group (of the update's process group), in order."""

    ranks: list
    rank: int

    @property
    def size(self):
        return len(self.ranks)

    @property
    def place(self):
        return self.ranks.index(self.rank)

    def layout(self, dim=None, split=1):
        if dim is None:
            return dict(mesh=dict(shape=[1], ranks=[self.rank]), placements=["replicate"])
        placement = dict(shard=dim) if split == 1 else dict(shard=dim, split=split)
        return dict(mesh=dict(shape=[self.size], ranks=self.ranks), placements=[placement])


def megatron_shards(chunks, ranks, grids=None):
    """The shards of a model: the list of its (virtual pipeline) chunks, or one module.

    grids: (tp, etp, ep) as Grid; default: those of megatron.core.parallel_state."""
    chunks = [unwrapped(chunk) for chunk in (chunks if isinstance(chunks, (list, tuple)) else [chunks])]
    tp, etp, ep = grids or parallel_grids(ranks)
    shards = []
    for chunk in chunks:
        check_config(chunk.config)
        sync_parameters(chunk)
        shards += Chunk(chunk, tp, etp, ep).shards()
    return shards


def unwrapped(module):
    """Without the wrappers of DDP and mixed precision."""
    while not hasattr(module, "config") or not hasattr(module, "decoder"):
        if not hasattr(module, "module"):
            raise ValueError(f"expected a Megatron-core model with a decoder, got {type(module).__name__}")
        module = module.module
    return module


def parallel_grids(ranks):
    import torch.distributed as dist
    from megatron.core import parallel_state as state

    def grid(group):
        return Grid([ranks.number_of(rank) for rank in dist.get_process_group_ranks(group)], ranks.rank)

    return (
        grid(state.get_tensor_model_parallel_group()),
        grid(state.get_expert_tensor_parallel_group()),
        grid(state.get_expert_model_parallel_group()),
    )


def check_config(config):
    """Refuses what is no plain copy of a checkpoint's tensor."""
    refused = dict(
        layernorm_zero_centered_gamma="norms are stored less one",
        fp8="its weights are stored in fp8",
        fp4="its weights are stored in fp4",
        mtp_num_layers="refit serves no layers of multi-token prediction",
    )
    for name, why in refused.items():
        if getattr(config, name, None):
            raise ValueError(f"{name} is set: {why}")
    for name in ("gtp_remat_size", "expert_gtp_remat_size"):
        if (getattr(config, name, None) or 1) > 1:
            raise ValueError(f"{name} is {getattr(config, name)}: it cuts weights along an axis that is not known")


def sync_parameters(chunk):
    """Completes gathers of parameters that the distributed optimizer has left to the next forward pass."""
    sync = getattr(chunk, "start_param_sync", None)
    if sync is not None:
        sync(force_sync=True)


class Chunk:
    """One chunk of a pipeline stage."""

    def __init__(self, model, tp, etp, ep):
        self.model, self.config, self.tp, self.etp, self.ep = model, model.config, tp, etp, ep
        self.heads = self.config.num_attention_heads
        self.groups = self.config.num_query_groups or self.heads
        self.head = self.config.kv_channels or self.config.hidden_size // self.heads
        self.gated = self.config.gated_linear_unit
        # The module knows its number in the whole model: stages may be uneven or virtual.
        self.layers = {index: layer.layer_number - 1 for index, layer in enumerate(model.decoder.layers)}

    def shards(self):
        state = self.model.state_dict(keep_vars=True)
        out = []
        for name, tensor in state.items():
            if SKIPPED.search(name) or not hasattr(tensor, "detach"):
                continue
            shard = self.outer(name, tensor) or self.inner(name, tensor)
            if shard is not None:
                out.append(shard)
        return out

    def outer(self, name, tensor):
        """Parameters that belong to no layer. A last stage's copy of a tied embedding is not sent."""
        if name == "embedding.word_embeddings.weight":
            return self.vocabulary("model.embed_tokens.weight", tensor)
        if name == "output_layer.weight":
            tied = getattr(self.model, "share_embeddings_and_output_weights", False)
            return SENT if tied else self.vocabulary("lm_head.weight", tensor)
        if name in ("decoder.final_layernorm.weight", "decoder.final_norm.weight"):
            return Shard("model.norm.weight", tuple(tensor.shape), self.tp.layout(), tensor.detach())
        return None

    def vocabulary(self, name, tensor):
        rows, cols = tensor.shape
        return Shard(name, (rows * self.tp.size, cols), self.tp.layout(0), tensor.detach(), padded=True)

    def inner(self, name, tensor):
        found = re.match(r"decoder\.layers\.(\d+)\.(.+)$", name)
        if found is None:
            raise ValueError(f"{name}: no tensor of a checkpoint is known for it")
        layer, rest = f"model.layers.{self.layers[int(found[1])]}.", found[2]
        local = tensor.detach()
        if rest in WHOLE:
            return Shard(layer + WHOLE[rest], tuple(local.shape), self.tp.layout(), local)
        expert = EXPERT.match(rest)
        if expert is not None:
            number = int(expert[1] or expert[4]) + self.ep.place * (self.config.num_moe_experts // self.ep.size)
            return self.mlp(f"{layer}mlp.experts.{number}.", expert[2] or expert[3], local, self.etp)
        if rest in ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"):
            return self.qkv(layer, rest.rsplit(".", 1)[1], local)
        if rest == "self_attention.linear_proj.weight":
            shape = (local.shape[0], local.shape[1] * self.tp.size)
            return Shard(layer + "self_attn.o_proj.weight", shape, self.tp.layout(1), local)
        dense = re.match(r"mlp\.linear_fc([12])\.weight$", rest)
        if dense is not None:
            return self.mlp(layer + "mlp.", dense[1], local, self.tp)
        raise ValueError(f"{name}: no tensor of a checkpoint is known for it")

    def qkv(self, layer, kind, local):
        """Rows by query group: the q heads of the group, its k head, its v head."""
        rows = [self.heads // self.groups * self.head, self.head, self.head]
        into = [(f"{layer}self_attn.{part}_proj.{kind}", count) for part, count in zip("qkv", rows)]
        shape = (self.groups * sum(rows), *local.shape[1:])
        if local.shape[0] * self.tp.size != shape[0]:
            raise ValueError(f"{layer}qkv: {local.shape[0]} rows on each of {self.tp.size} ranks are not {shape[0]}")
        return Shard(f"{layer}self_attn.qkv_proj.{kind}", shape, self.tp.layout(0), local, into)

    def mlp(self, prefix, number, local, grid):
        if number == "2":
            shape = (local.shape[0], local.shape[1] * grid.size)
            return Shard(prefix + "down_proj.weight", shape, grid.layout(1), local)
        shape = (local.shape[0] * grid.size, local.shape[1])
        if not self.gated:
            raise ValueError(f"{prefix}: refit serves no MLP without a gate")
        # Each rank has its gate rows, then its up rows.
        into = [(f"{prefix}{part}_proj.weight", shape[0] // 2) for part in ("gate", "up")]
        return Shard(prefix + "gate_up_proj.weight", shape, grid.layout(0, split=2), local, into)


# A parameter that another rank or parameter brings.
SENT = Shard("", (), {}, None)
