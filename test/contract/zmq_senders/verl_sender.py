"""verl's sender of buckets; as a program, one that dies in the middle (tensor_process.Process)."""

import gc
import io
import os
import pathlib
import pickle
import signal
import sys
import uuid
from multiprocessing import shared_memory
from multiprocessing.reduction import ForkingPickler

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "gpu"))

import torch  # noqa: E402
from torch.multiprocessing.reductions import reduce_tensor  # noqa: E402

from answering import answer  # noqa: E402
from zmq_req import Req  # noqa: E402

BUCKET = 40 << 10


def dumps(message):
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(message)
    return buffer.getvalue()


class Sender:
    """verl's BucketedWeightSender: a REQ socket, the buffer, the buckets, and larger tensors alone.

    It ignores replies.
    """

    def __init__(self, endpoint, device, use_shm, size=BUCKET):
        self.endpoint, self.device, self.use_shm, self.size = endpoint, device, use_shm, size
        self.shm, self.buckets = None, 0

    def ask(self, message):
        self.socket.send(pickle.dumps(message) if self.use_shm else dumps(message))
        self.socket.recv()

    def send(self, weights, spoil=None):
        """spoil: called with the number of each bucket and its metadata; returns the metadata that is sent."""
        path = pathlib.Path(self.endpoint[len("ipc://") :])
        path.unlink(missing_ok=True)
        self.socket = Req(self.endpoint)
        try:
            if self.use_shm:
                name = f"verl_weights_{uuid.uuid4().hex}"
                self.shm = shared_memory.SharedMemory(name=name, create=True, size=self.size)
                buffer = torch.frombuffer(self.shm.buf, dtype=torch.uint8)
                self.ask(dict(name=self.shm.name, size=self.size))
            else:
                buffer = torch.empty(self.size, dtype=torch.uint8, device=self.device)
                self.ask(reduce_tensor(buffer))
            meta, offset = {}, 0
            for name, weight in weights:
                if offset + weight.nbytes > self.size and meta:
                    self.bucket(meta, False, spoil)
                    meta, offset = {}, 0
                if weight.nbytes > self.size:
                    assert not self.use_shm, f"{name} is larger than the buffer"
                    self.bucket(
                        {
                            name: dict(
                                name=name,
                                shape=weight.shape,
                                dtype=weight.dtype,
                                offset=0,
                                handle=reduce_tensor(weight),
                            )
                        },
                        False,
                    )
                    continue
                meta[name] = dict(name=name, shape=weight.shape, dtype=weight.dtype, offset=offset, handle=None)
                buffer[offset : offset + weight.nbytes].view(weight.dtype).view(weight.shape).copy_(weight)
                offset += weight.nbytes
            self.bucket(meta, True, spoil)
        finally:
            self.socket.close()
            path.unlink(missing_ok=True)
            buffer = None
            gc.collect()
            if self.shm is not None:
                self.shm.close()
                self.shm.unlink()
            if self.device != "cpu":
                torch.cuda.ipc_collect()

    def bucket(self, meta, is_last, spoil=None):
        if self.device != "cpu":
            torch.cuda.synchronize()
        meta = spoil(self.buckets, meta) if spoil else meta
        self.buckets += 1
        self.ask(dict(bucket_meta=meta, is_last=is_last))


class Mortal:
    def die(self, endpoint, tensors, size, bucket):
        """Sends tensors of zeros (name -> shape), and dies before that bucket."""

        def spoil(index, meta):
            if index == bucket:
                os.kill(os.getpid(), signal.SIGKILL)
            return meta

        Sender(endpoint, "cpu", True, size).send([(name, torch.zeros(shape)) for name, shape in tensors], spoil)


if __name__ == "__main__":
    answer(Mortal())
