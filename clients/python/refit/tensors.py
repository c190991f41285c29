"""A trainer's tensors: models, their names in checkpoints, and handles of tensors."""

import base64
import io
import re
from dataclasses import dataclass


def dtype_name(dtype):
    """torch.bfloat16 -> "bfloat16"."""
    return str(dtype).rsplit(".", 1)[-1]


@dataclass
class FlattenedTensorMetadata:
    """The place of a tensor in a flat tensor of bytes. Servers recognise SGLang's class by this name, in any module."""

    name: str
    shape: object
    dtype: object
    start_idx: int
    end_idx: int
    numel: int


def pickled(obj):
    """Base64 of torch's pickle of handles.

    CPU storages are shared by file name: a file descriptor could only be passed to a child of this process, and the
    server is none."""
    from multiprocessing.reduction import ForkingPickler

    import torch.multiprocessing as tm

    strategy, buffer = tm.get_sharing_strategy(), io.BytesIO()
    tm.set_sharing_strategy("file_system")
    try:
        ForkingPickler(buffer).dump(obj)
    finally:
        tm.set_sharing_strategy(strategy)
    return base64.b64encode(buffer.getvalue()).decode()


def handle(tensor):
    """The object to pickle for a tensor: for a GPU tensor {UUID: torch's reduction}, because the two sides may number
    GPUs differently."""
    if tensor.device.type != "cuda":
        return tensor
    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    return {str(torch.cuda.get_device_properties(tensor.device).uuid): reduce_tensor(tensor)}


def full(tensor):
    """The whole tensor. A DTensor is gathered: all ranks of its mesh must call this, in the same order."""
    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):
        return tensor.to(tensor.device_mesh.device_type).full_tensor()
    return tensor


# Prefixes that wrappers put into names: torch.compile, FSDP1, activation checkpoints.
WRAPPERS = re.compile(r"(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


def weights_of(model):
    """Yields (name in checkpoints, tensor) for a module's parameters and persistent buffers, tied ones once.

    Sharded tensors are not gathered: see `full`."""
    tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    stored = set(model.state_dict().keys())
    named = list(model.named_parameters())
    named += [(name, buffer) for name, buffer in model.named_buffers() if name in stored]
    for name, tensor in named:
        name = WRAPPERS.sub("", name)
        name = name[7:] if name.startswith("module.") else name
        if "lora_" in name:
            raise ValueError(
                f"{name}: it belongs to an adapter; send that by add_adapter(), or the model after merge_and_unload()"
            )
        if not (tied and name == "lm_head.weight"):
            yield name, tensor


def checkpoint_form(model, name, tensor):
    """[(name, tensor)] as checkpoints and refit have them: transformers 5 fuses experts in memory."""
    if not re.search(r"\.experts\.(?!\d)", name):
        return [(name, tensor)]
    from transformers.core_model_loading import revert_weight_conversion

    return list(revert_weight_conversion(model, {name: tensor}).items())
