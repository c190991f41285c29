"""A trainer's process that sends as vLLM's and SkyRL's clients do. Commands and replies are lines of JSON.

tensor_process.Process starts it. Over NCCL it is vLLM's communicator (pynccl.py), over gloo one of torch's groups.
Handles of GPU memory are the results of reduce_tensor, by the GPU's UUID.
"""

import base64
import datetime
import gc
import os
import pathlib
import pickle
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "gpu"), str(HERE.parents[1] / "examples/trainers")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.multiprocessing.reductions import reduce_tensor  # noqa: E402

import tensor_payloads as payloads  # noqa: E402
from answering import answer  # noqa: E402
from process_group import init_custom_process_group  # noqa: E402

TIMEOUT_S = 60


def packed(tensors, limit):
    """Chunks of bytes: consecutive tensors without gaps. The tensor that exceeds the limit ends its chunk."""
    chunk, size = [], 0
    for tensor in tensors:
        chunk.append(tensor.contiguous().view(torch.uint8).view(-1))
        size += chunk[-1].numel()
        if size > limit:
            yield torch.cat(chunk)
            chunk, size = [], 0
    if chunk:
        yield torch.cat(chunk)


class Sender:
    def __init__(self):
        self.shares, self.alive, self.buffer = payloads.Shares(), [], None

    def start(self, device, shapes):
        """Prepares a test: drops everything of the one before."""
        self.device = torch.device(device)
        self.shapes = {name: tuple(shape) for name, shape in shapes}
        if self.device.type == "cpu":
            torch.set_num_threads(1)
        else:
            torch.cuda.set_device(self.device)
            torch.zeros(1, device=self.device)
        return dict(pid=os.getpid(), torch=torch.__version__)

    def tensors(self, variant, names, dtypes=None):
        made = [payloads.coded(variant, name, self.shapes[name]) for name in names]
        return [
            tensor.to(self.device).to(getattr(torch, (dtypes or {}).get(name, "bfloat16")))
            for name, tensor in zip(names, made)
        ]

    def join(self, backend, name, address, port, world):
        if backend == "nccl":
            import pynccl

            self.group = pynccl.StatelessGroup(address, port, 0, world, TIMEOUT_S)
            self.wire = pynccl.Communicator(self.group, self.device)
            return dict(nccl=self.wire.version())
        self.group = init_custom_process_group(
            "gloo", f"tcp://{address}:{port}", world, 0, name, datetime.timedelta(seconds=TIMEOUT_S)
        )
        self.wire = None
        return {}

    def broadcast(self, tensor):
        if self.wire is None:
            dist.broadcast(tensor, 0, group=self.group)
        else:
            self.wire.broadcast(tensor, 0)
            torch.cuda.synchronize()

    def send(self, variant, names, limit=None, dtypes=None):
        """Sends tensors packed into chunks of `limit` bytes, or each alone without a limit."""
        tensors = self.tensors(variant, names, dtypes)
        chunks = list(tensors if limit is None else packed(tensors, limit))
        for chunk in chunks:
            self.broadcast(chunk)
        return [chunk.numel() * chunk.element_size() for chunk in chunks]

    def leave(self):
        if self.wire is None:
            dist.destroy_process_group(self.group)
        else:
            self.wire.abort()
        self.group = self.wire = None

    def dumps(self, value):
        return base64.b64encode(pickle.dumps(value)).decode()

    def export(self, tensor):
        function, args = reduce_tensor(tensor)
        self.shares.add(args)
        self.alive.append(tensor)
        return function, args

    def card(self):
        return payloads.uuid_of(self.device.index)

    def each(self, variant, names, bare):
        """`ipc_handles_pickled` with a handle for every tensor."""
        handles = [self.export(tensor) for tensor in self.tensors(variant, names)]
        torch.cuda.synchronize()
        return self.dumps([{self.card(): handle[1] if bare else handle} for handle in handles])

    def into_buffer(self, variant, names, size):
        """vLLM's packed chunks in one buffer that is exported once: (`ipc_handles_pickled`, tensor_sizes)."""
        if self.buffer is None or self.buffer.numel() != size:
            self.buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
            self.buffer_handle = self.export(self.buffer)[1]
        flat = [tensor.view(torch.uint8).view(-1) for tensor in self.tensors(variant, names)]
        at = 0
        for piece in flat:
            self.buffer[at : at + piece.numel()].copy_(piece)
            at += piece.numel()
        torch.cuda.current_stream().synchronize()
        return [self.dumps({self.card(): self.buffer_handle}), [piece.numel() for piece in flat]]

    def chunk(self, variant, names):
        """SkyRL's chunks, each a new tensor of one dtype: (`ipc_handles_pickled`, sizes)."""
        tensors = self.tensors(variant, names)
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        handle = self.export(flat)
        torch.cuda.synchronize()
        return [self.dumps({self.card(): handle}), [tensor.numel() for tensor in tensors]]

    def left(self):
        """{value of a handle's counter: number of handles}, with strings as keys as in JSON."""
        return {str(value): count for value, count in self.shares.left().items()}

    def forget(self):
        """Frees everything, and collects the memory that receivers have returned."""
        self.alive, self.buffer, self.buffer_handle = [], None, None
        gc.collect()
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()


if __name__ == "__main__":
    answer(Sender())
