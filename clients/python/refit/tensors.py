"""A trainer's tensors: models, their names in checkpoints, and handles of tensors."""

import base64
import contextlib
import io
import re
from dataclasses import dataclass

# How often torch is asked to share a tensor, each time for a second.
SHARE_TRIES = 30


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


@contextlib.contextmanager
def by_file_name():
    """CPU storages are shared by file name: a file descriptor could only be passed to a child of this process, and the
    server is none."""
    import torch.multiprocessing as tm

    strategy = tm.get_sharing_strategy()
    tm.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        tm.set_sharing_strategy(strategy)


def pickled(obj):
    """Base64 of torch's pickle of handles."""
    from multiprocessing.reduction import ForkingPickler

    buffer = io.BytesIO()
    with by_file_name():
        ForkingPickler(buffer).dump(obj)
    return base64.b64encode(buffer.getvalue()).decode()


def share(tensor):
    """Moves a CPU tensor into shared memory, where a pickle leaves it.

    torch's manager of shared memory has one second to answer, and on a busy machine needs more: it is asked again. A
    pickle could not be made again, because it counts a reader of each tensor."""
    if tensor.untyped_storage().nbytes() == 0:
        return
    with by_file_name():
        for left in reversed(range(SHARE_TRIES)):
            try:
                tensor.share_memory_()
                return
            except RuntimeError as error:
                if left == 0 or "Shared memory manager" not in str(error):
                    raise


def handle(tensor):
    """The object to pickle for a tensor: for a GPU tensor {UUID: torch's reduction}, because the two sides may number
    GPUs differently."""
    if tensor.device.type != "cuda":
        share(tensor)
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
