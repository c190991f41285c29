"""vLLM's StatelessProcessGroup and PyNcclCommunicator over ctypes: a TCPStore with pickled objects, and NCCL.

Written from their wire format: TCPStore counts the ranks, and objects are pickled under broadcast_from/SRC/COUNTER. The
first object is the communicator's id (a ctypes structure). A sum of one float32 follows. The library is torch's.
"""

import ctypes
import datetime
import importlib.util
import os
import pathlib
import pickle
import socket
import sys
import types

import torch
import torch.distributed as dist

MODULE = "vllm.distributed.device_communicators.pynccl_wrapper"
SUCCESS, SUM = 0, 0
TYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}


class ncclUniqueId(ctypes.Structure):  # noqa: N801 (vLLM's name travels in the pickle)
    _fields_ = [("internal", ctypes.c_byte * 128)]


def pose_as_vllm():
    """Places the class in vLLM's module, because its pickle names that module."""
    parts = MODULE.split(".")
    for end in range(1, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
    sys.modules[MODULE].ncclUniqueId = ncclUniqueId
    ncclUniqueId.__module__ = MODULE


pose_as_vllm()


class StatelessGroup:
    """Rank 0 hosts the store and waits for `world` ranks, as every TCPStore with a world size does."""

    def __init__(self, host, port, rank, world, timeout_s=60):
        self.rank, self.world, self.sent, self.received = rank, world, 0, {}
        # The store takes over the descriptor and closes it.
        listener = None
        if rank == 0:
            listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen()
        self.store = dist.TCPStore(
            host,
            port,
            world,
            rank == 0,
            datetime.timedelta(seconds=timeout_s),
            use_libuv=False,
            **({} if listener is None else dict(master_listen_fd=listener.detach())),
        )

    def broadcast_object(self, value, src):
        if self.rank == src:
            self.store.set(f"broadcast_from/{src}/{self.sent}", pickle.dumps(value))
            self.sent += 1
            return value
        count = self.received.get(src, 0)
        self.received[src] = count + 1
        return pickle.loads(self.store.get(f"broadcast_from/{src}/{count}"))


def library_path():
    """$REFIT_NCCL, else the library that torch loads."""
    if "REFIT_NCCL" in os.environ:
        return os.environ["REFIT_NCCL"]
    found = importlib.util.find_spec("nvidia.nccl")
    for folder in [] if found is None else found.submodule_search_locations:
        path = pathlib.Path(folder) / "lib/libnccl.so.2"
        if path.exists():
            return str(path)
    return "libnccl.so.2"


class Communicator:
    """A collective call of all ranks. `device`: the caller's (a torch.device with an index)."""

    def __init__(self, group, device, library=None):
        self.device, self.rank, self.world = torch.device(device), group.rank, group.world
        self.nccl = ctypes.CDLL(library or library_path())
        self.nccl.ncclGetErrorString.restype = ctypes.c_char_p
        # The id is passed by value.
        self.nccl.ncclCommInitRank.argtypes = [
            ctypes.POINTER(ctypes.c_void_p),
            ctypes.c_int,
            ncclUniqueId,
            ctypes.c_int,
        ]
        call = [
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_void_p,
        ]
        self.nccl.ncclAllReduce.argtypes = self.nccl.ncclBroadcast.argtypes = call
        self.nccl.ncclCommAbort.argtypes = [ctypes.c_void_p]
        unique_id = ncclUniqueId()
        if group.rank == 0:
            self.check(self.nccl.ncclGetUniqueId(ctypes.byref(unique_id)))
        unique_id = group.broadcast_object(unique_id, 0)
        self.comm = ctypes.c_void_p()
        with torch.cuda.device(self.device):
            self.check(self.nccl.ncclCommInitRank(ctypes.byref(self.comm), group.world, unique_id, group.rank))
            self.sum(torch.zeros(1, device=self.device))
            torch.cuda.current_stream().synchronize()

    def version(self):
        version = ctypes.c_int()
        self.check(self.nccl.ncclGetVersion(ctypes.byref(version)))
        return version.value

    def check(self, result):
        if result != SUCCESS:
            raise RuntimeError(f"NCCL: {self.nccl.ncclGetErrorString(result).decode()}")

    def sum(self, tensor):
        at = ctypes.c_void_p(tensor.data_ptr())
        self.check(self.nccl.ncclAllReduce(at, at, tensor.numel(), TYPES[tensor.dtype], SUM, self.comm, self.stream()))

    def broadcast(self, tensor, src):
        """Enqueues the broadcast on the current stream and does not wait for it."""
        at = ctypes.c_void_p(tensor.data_ptr())
        self.check(self.nccl.ncclBroadcast(at, at, tensor.numel(), TYPES[tensor.dtype], src, self.comm, self.stream()))

    def stream(self):
        return ctypes.c_void_p(torch.cuda.current_stream(self.device).cuda_stream)

    def abort(self):
        comm, self.comm = self.comm, None
        if comm is not None:
            self.check(self.nccl.ncclCommAbort(comm))
