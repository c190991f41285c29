"""Shared by the tests of checkpoint-engine: its request functions, devices, and engines."""

import os

import torch
from tensor_process import shared_files

BUCKET = 16 << 10


def files_left():
    # torch removes a counter file at its next check once nothing counts in it. An exception may hold the last
    # reference.
    if torch.cuda.is_initialized():
        torch.cuda.ipc_collect()
    return set(shared_files(os.getpid()))


def sglang(engine, flush_cache=True, version=None, timeout=120):
    """The request function for SGLang: rank 0 of the parameter server posts once its sockets are bound."""
    fields = {} if version is None else dict(weight_version=version)
    return lambda sockets: engine.post(
        "/update_weights_from_ipc", dict(zmq_handles=sockets, flush_cache=flush_cache, **fields), timeout=timeout
    )


def vllm(engine, timeout=300):
    return lambda sockets: engine.post(
        "/collective_rpc", dict(method="update_weights_from_ipc", args=[sockets], timeout=timeout)
    )


def devices(device, count):
    return ["cpu"] * count if device == "cpu" else [f"cuda:{index}" for index in range(count)]


def served(engines, ranks=1, device="cpu", kind="qwen3", on_one_card=False):
    if on_one_card and device == "cuda" and ranks > 1:
        return engines(
            kind, ranks, device, which="on one card", env={"REFIT_CUDA_SHARE_CARD": "1", "CUDA_VISIBLE_DEVICES": "0"}
        )
    return engines(kind, ranks, device)
