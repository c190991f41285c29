"""Adapters as trainers hold them: a configuration, and tensors by PEFT's names."""

import enum
import json
import os
import re

from .tensors import WRAPPERS

# The name of an adapter that get_peft_model_state_dict leaves in a name belongs to another adapter of the model.
OTHERS = re.compile(r"\.lora_(A|B)\.(?!weight$)[^.]+\.weight$|\.lora_embedding_(A|B)\.[^.]+$")


def adapter_of(adapter, adapter_name=None, with_tensors=True):
    """(config, [(name, tensor)]) of a PEFT model, of a folder that PEFT has saved, or of a pair (config, tensors).

    Sharded tensors are not gathered. config: a dict that JSON can hold. Without `with_tensors`, a folder's tensors are
    not read."""
    if isinstance(adapter, (str, os.PathLike)):
        return of_folder(adapter, with_tensors)
    if hasattr(adapter, "peft_config"):
        config, tensors = of_model(adapter, adapter_name)
    elif isinstance(adapter, tuple) and len(adapter) == 2:
        config, tensors = adapter
    else:
        kind = type(adapter).__name__
        raise TypeError(f"adapter: expected a PEFT model, a folder or (config, tensors), got {kind}")
    named = list(tensors.items() if hasattr(tensors, "items") else tensors)
    if not named:
        raise ValueError("adapter: it has no tensors")
    return plain(config), named


def of_model(model, adapter_name):
    from peft import get_peft_model_state_dict

    if adapter_name is None:
        adapter_name = model.active_adapter
    if adapter_name not in model.peft_config:
        names = ", ".join(map(repr, model.peft_config))
        raise ValueError(f"adapter_name: expected one of {names}, got {adapter_name!r}")
    # The base model's embeddings are no part of an adapter, and "auto" may search for the base model on a hub.
    state = get_peft_model_state_dict(model, adapter_name=adapter_name, save_embedding_layers=False)
    named = [(WRAPPERS.sub("", name), tensor) for name, tensor in state.items() if not OTHERS.search(name)]
    return model.peft_config[adapter_name], named


def of_folder(folder, with_tensors):
    path = os.path.join(folder, "adapter_model.safetensors")
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path} does not exist: save the adapter with safe_serialization=True")
    with open(os.path.join(folder, "adapter_config.json")) as file:
        config = json.load(file)
    if not with_tensors:
        return config, []
    from safetensors.torch import load_file

    return config, list(load_file(path).items())


def plain(config):
    """PEFT's configuration as the content of adapter_config.json."""
    fields = config.to_dict() if hasattr(config, "to_dict") else dict(config)
    return json.loads(json.dumps(fields, default=to_json))


def to_json(value):
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return value.value if isinstance(value, enum.Enum) else str(value)
