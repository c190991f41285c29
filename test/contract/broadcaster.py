"""A trainer's process that broadcasts as prime-rl, TRL and AReaL do. It reads commands as lines of JSON.

tensor_process.Process starts it. Over NCCL it is vLLM's communicator (pynccl.py), over gloo one of torch's groups.
"""

import datetime
import gc
import pathlib
import pickle
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "gpu"), str(HERE.parents[1] / "examples/trainers")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import tensor_payloads as payloads  # noqa: E402
from answering import answer  # noqa: E402
from process_group import init_custom_process_group  # noqa: E402

TIMEOUT_S = 60


class Gloo:
    """The group, and the store that vLLM's process group would use for its barrier."""

    def __init__(self, name, address, port, rank, world):
        self.device, self.rank, self.world = torch.device("cpu"), rank, world
        self.group = init_custom_process_group(
            "gloo", f"tcp://{address}:{port}", world, rank, name, datetime.timedelta(seconds=TIMEOUT_S)
        )
        self.store = dist.TCPStore(
            address, port, is_master=False, wait_for_workers=False, timeout=datetime.timedelta(seconds=TIMEOUT_S)
        )

    def broadcast(self, tensor, src):
        dist.broadcast(tensor, src, group=self.group)

    def leave(self):
        dist.destroy_process_group(self.group)


class Nccl:
    def __init__(self, _name, address, port, rank, world):
        import pynccl

        torch.cuda.set_device(0)
        self.device, self.rank, self.world = torch.device("cuda:0"), rank, world
        self.process_group = pynccl.StatelessGroup(address, port, rank, world)
        self.communicator = pynccl.Communicator(self.process_group, self.device)
        self.store = self.process_group.store

    def broadcast(self, tensor, src):
        self.communicator.broadcast(tensor, src)
        torch.cuda.synchronize()

    def leave(self):
        self.communicator = self.process_group = self.store = None


class Broadcaster:
    def __init__(self):
        self.wire, self.barriers = None, 0

    def join(self, backend, name, address, port, rank, world):
        self.wire = (Nccl if backend == "nccl" else Gloo)(name, address, port, rank, world)
        self.barriers = 0

    def leave(self):
        wire, self.wire = self.wire, None
        wire.leave()
        del wire
        gc.collect()

    def send(self, tensor, src=0):
        self.wire.broadcast(tensor.contiguous().to(self.wire.device), src)

    def integer(self, value):
        self.send(torch.tensor([value], dtype=torch.long))

    def state_dicts(self, variant, dicts, count=None, metadata=None, upto=None):
        """prime-rl's broadcast_weights.

        `dicts`: lists of (name, shape, dtype). `count` and `metadata` (hex) replace the true ones. `upto`: sends only
        so many dicts.
        """
        torch.set_num_threads(1)
        self.integer(len(dicts) if count is None else count)
        for entries in dicts[:upto]:
            groups = {}
            for name, shape, dtype in entries:
                tensor = payloads.coded(variant, name, shape).to(getattr(torch, dtype))
                groups.setdefault(tensor.dtype, []).append((name, tensor))
            state = pickle.dumps(
                {
                    dtype: [(name, tensor.shape, tensor.numel()) for name, tensor in named]
                    for dtype, named in groups.items()
                }
            )
            if metadata is not None:
                state = bytes.fromhex(metadata)
            self.integer(len(state))
            self.send(torch.frombuffer(bytearray(state), dtype=torch.uint8))
            for named in groups.values():
                self.send(torch.cat([tensor.flatten() for _, tensor in named]))

    def parameter(self, variant, name, shape, dtype, barrier):
        """TRL's update_named_param, after the reply to its request."""
        self.send(payloads.coded(variant, name, shape).to(getattr(torch, dtype)), src=self.wire.world - 1)
        began = time.monotonic()
        getattr(self, f"{barrier}_barrier")()
        return time.monotonic() - began

    def packed(self, variant, tensors, buffer_bytes=1 << 30, receives=False):
        """vLLM's packed chunks: a chunk ends with the tensor that exceeds the buffer.

        All ranks of the trainer take part.
        """
        chunk, size = [], 0
        for index, (name, shape) in enumerate(tensors):
            chunk.append(payloads.coded(variant, name, shape).view(-1).view(torch.uint8))
            size += chunk[-1].numel()
            if size > buffer_bytes or index + 1 == len(tensors):
                data = torch.cat(chunk)
                self.send(torch.zeros_like(data) if receives else data)
                chunk, size = [], 0

    def old_barrier(self):
        """vLLM up to 0.8: every rank broadcasts an object and reads the others'."""
        store, rank = self.wire.store, self.wire.rank
        for other in range(self.wire.world):
            if other == rank:
                store.set(f"broadcast_from/{rank}/{self.barriers}", pickle.dumps(None))
            else:
                # Rank 0 has broadcast the communicator's id before.
                pickle.loads(store.get(f"broadcast_from/{other}/{self.barriers + (1 if other == 0 else 0)}"))
        self.barriers += 1

    def new_barrier(self):
        """Later versions: rank 0 broadcasts an id, and every rank sets keys with it."""
        store, rank = self.wire.store, self.wire.rank
        name = pickle.loads(store.get(f"broadcast_from/0/{self.barriers + 1}"))
        self.barriers += 1
        store.set(f"arrival_{name}_{rank}", b"1")
        for other in range(self.wire.world):
            store.get(f"arrival_{name}_{other}")
        store.set(f"departure_{name}_{rank}", b"1")

    def keys(self):
        return self.wire.store.num_keys()

    def uuid(self):
        return str(torch.cuda.get_device_properties(0).uuid)


if __name__ == "__main__":
    answer(Broadcaster())
