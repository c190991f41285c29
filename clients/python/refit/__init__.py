"""A client of refit for trainers: generation, control, and weight updates over whichever transport reaches the engine.

    from refit import Client

    client = Client("http://127.0.0.1:30000")
    with client.update(version="step-1") as update:
        update.add_all(model)
    print(client.generate("12+34=", {"max_new_tokens": 4})["text"])

It needs the standard library alone; torch is imported where tensors are used. Python 3.9 or newer. README.md in the
folder above is the manual.
"""

from .adapter_digest import AdapterDigest
from .bodies import FormBody, PathBody, SafetensorsBody
from .client import Client, Clients, Engines
from .errors import EnginesFailed, RefitError
from .group import Group
from .tensors import FlattenedTensorMetadata, checkpoint_form, dtype_name, full, handle, pickled, weights_of
from .transports import MOST_KEPT, MOST_TENSORS
from .update import Update

__version__ = "0.1.0"

__all__ = [
    "MOST_KEPT",
    "MOST_TENSORS",
    "AdapterDigest",
    "Client",
    "Clients",
    "Engines",
    "EnginesFailed",
    "FlattenedTensorMetadata",
    "FormBody",
    "Group",
    "PathBody",
    "RefitError",
    "SafetensorsBody",
    "Update",
    "checkpoint_form",
    "dtype_name",
    "full",
    "handle",
    "pickled",
    "weights_of",
]
