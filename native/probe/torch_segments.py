"""Counts the segments of a model's state dict, and measures how long another process takes to open and close them.

usage: torch_segments.py IPC_PROGRAM     (native/probe/ipc.cu, built)

Every tensor of the state dict is allocated as torch does it for a model on a GPU, and exported as torch.multiprocessing
exports it; equal handles are one segment of its caching allocator. One run uses a cudaMalloc for each tensor instead.
"""

import ctypes
import json
import math
import pathlib
import subprocess
import sys
import tempfile
import time

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "test/gpu"))
import models  # noqa: E402


def runtime():
    """The CUDA runtime that torch has loaded."""
    torch.cuda.init()
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "libcudart.so" in line}
    return ctypes.CDLL(paths.pop())


def exported_by_torch(shapes):
    held = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for _, shape in shapes]
    return held, [tensor.untyped_storage()._share_cuda_()[1] for tensor in held]


def exported_one_by_one(shapes):
    library, handles = runtime(), []
    torch.cuda.synchronize()
    for _, shape in shapes:
        pointer, handle = ctypes.c_void_p(), ctypes.create_string_buffer(64)
        if library.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(2 * math.prod(shape))) != 0:
            sys.exit("cudaMalloc failed")
        if library.cudaIpcGetMemHandle(handle, pointer) != 0:
            sys.exit("cudaIpcGetMemHandle failed")
        handles.append(handle.raw)
    return None, handles  # freed by the end of this process


def measure(name, program, way):
    shapes = models.tensors(models.REAL[name])
    allocator = dict(torch="torch's caching allocator", own="each its own cudaMalloc")[way]
    title = f"{name} state dict, {len(shapes)} tensors, {allocator}"
    free, _ = torch.cuda.mem_get_info()
    needed = 1.1 * models.size(shapes)
    if free < needed:
        reason = f"{free / 1e9:.0f} GB free on the GPU, {needed / 1e9:.0f} needed"
        print(f"| torch | {title} | not measured: {reason} |", flush=True)
        return
    started = time.perf_counter()
    held, exported = (exported_by_torch if way == "torch" else exported_one_by_one)(shapes)
    export_ms = 1000 * (time.perf_counter() - started)
    lengths = sorted({len(handle) for handle in exported})
    # torch puts a version and a kind before the 64 bytes of the driver's handle.
    handles = list(dict.fromkeys(handle[-64:] for handle in exported))
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"".join(handles))
        file.flush()
        opened = subprocess.run([program, "open", file.name], capture_output=True, text=True)
    if opened.returncode != 0:
        sys.exit(f"{title}: {len(handles)} segments; opening them failed: {opened.stderr.strip()}")
    got = json.loads(opened.stdout)
    print(
        f"| torch | {title} | {len(handles)} segments (handles of {lengths} bytes, the first begins with "
        f"{exported[0][:2].hex()}; allocated and exported in {export_ms:.0f} ms); another process opens all in "
        f"{got['open_ms'][0]:.1f} ms, again {got['open_ms'][1]:.1f} ({got['open_us']:.0f} us each), "
        f"closes in {got['close_ms'][0]:.1f} ms ({got['close_us']:.0f} us each) |",
        flush=True,
    )


if __name__ == "__main__":
    if len(sys.argv) == 4:
        measure(sys.argv[2], sys.argv[1], sys.argv[3])
    else:
        for which, how in [("qwen3-8b", "torch"), ("qwen3-8b", "own"), ("qwen3-30b-a3b", "torch")]:
            done = subprocess.run([sys.executable, __file__, sys.argv[1], which, how])
            if done.returncode != 0:
                sys.exit(done.returncode)
