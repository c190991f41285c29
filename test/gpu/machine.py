"""The machine's GPUs, their memory, and room for checkpoints."""

import contextlib
import os
import pathlib
import shutil
import tempfile

import torch

import models
from harness import Skip
from server import settled


def cards():
    return torch.cuda.device_count()


def free_on_card(index=0):
    return torch.cuda.mem_get_info(index)[0]


def device_flags(options, tp=1):
    """(flags, environment) of a server with so many ranks. If there are fewer GPUs, ranks share one."""
    flags = ["--device", options.device, "--tp", tp, "--skip-tokenizer-init"]
    env = {}
    if options.device != "cpu" and tp > cards():
        env["REFIT_CUDA_SHARE_CARD"] = "1"
    if options.device == "cpu":
        flags += ["--threads", min(4, os.cpu_count())]
    return flags, env


def torch_device(options):
    return "cpu" if options.device == "cpu" else "cuda:0"


@contextlib.contextmanager
def room(options, bytes_needed=0):
    """A folder for checkpoints that is removed at the end: in shared memory if they fit, else on disk."""
    places = [options.folder] if options.folder else ["/dev/shm", tempfile.gettempdir()]
    free = {place: shutil.disk_usage(place).free for place in places if os.path.isdir(place)}
    fitting = [place for place, left in free.items() if left > 1.05 * bytes_needed + (64 << 20)]
    if not fitting:
        raise Skip(
            f"{bytes_needed / 1e9:.1f} GB of checkpoints do not fit: "
            + ", ".join(f"{place} has {left / 1e9:.1f}" for place, left in free.items())
        )
    folder = tempfile.mkdtemp(prefix=f"refit-gpu-{os.getpid()}-", dir=fitting[0])
    try:
        yield pathlib.Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def layers_that_fit(name, bytes_free):
    """The number of layers of a model of REAL that fit in so many bytes of bfloat16."""
    config = models.REAL[name]
    one = models.size(models.tensors(dict(config, num_hidden_layers=1)))
    two = models.size(models.tensors(dict(config, num_hidden_layers=2)))
    return max(0, min(config["num_hidden_layers"], int((bytes_free - (2 * one - two)) / (two - one))))


__all__ = ["cards", "device_flags", "free_on_card", "layers_that_fit", "room", "settled", "torch_device"]
