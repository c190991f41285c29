"""FSDP1 (FullyShardedDataParallel): its flat parameters are ranges of flattened tensors."""

from .shards import Shard
from .tensors import WRAPPERS


def flat_modules(model):
    """[(prefix, FlatParameter)] of the units of a module that FSDP1 has wrapped; empty for any other module.

    The flat parameters are what LOCAL_STATE_DICT holds. FULL and SHARDED state dicts gather before they cut."""
    found = []
    for prefix, module in model.named_modules() if hasattr(model, "named_modules") else []:
        flat = getattr(module, "_flat_param", None)
        if flat is not None and hasattr(flat, "_shard_param_infos"):
            found.append((prefix, flat))
    return found


def flat_shards(model, flat, ranks):
    """The range of each parameter that this rank's flat parameters hold, as views of them."""
    tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    shards = []
    for prefix, flat_param in flat:
        local = flat_param.detach()
        local = getattr(flat_param, "_local_shard", local).detach()
        for name, shape, info in zip(flat_param._fqns, flat_param._shapes, flat_param._shard_param_infos):
            full = WRAPPERS.sub("", f"{prefix}.{name}" if prefix else name)
            full = full[7:] if full.startswith("module.") else full
            if tied and full == "lm_head.weight":
                continue
            shards.append(flat_shard(full, tuple(shape), info, local, ranks))
    return shards


def flat_shard(name, shape, info, local, ranks):
    """info: a _ShardParamInfo of torch: whether the parameter lies in this rank's shard, where it begins there, how
    many elements of it, and the first and last (inclusive) of the parameter's elements."""
    if not info.in_shard:
        return Shard(name, shape, dict(flat=[]), None)
    begin = info.intra_param_start_idx
    layout = dict(flat=[{"rank": ranks.rank, "from": begin, "to": info.intra_param_end_idx + 1}])
    return Shard(name, shape, layout, local.narrow(0, info.offset_in_shard, info.numel_in_shard))
