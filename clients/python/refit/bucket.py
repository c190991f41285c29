"""The tensors of one request."""

MIB = 1 << 20


class Bucket:
    """The tensors of one request.

    entries: (name, dtype, shape, first byte, bytes), in order. tensors: the tensors themselves; or flat: one tensor of
    all their bytes. capacity: the bytes that flat has at first."""

    def __init__(self, capacity=64 * MIB):
        self.capacity = capacity
        self.entries, self.tensors, self.flat, self.bytes = [], [], None, 0

    def note(self, name, tensor):
        size = tensor.numel() * tensor.element_size()
        self.entries.append((name, tensor.dtype, tensor.shape, self.bytes, size))
        self.bytes += size

    def named(self):
        return [(entry[0], tensor) for entry, tensor in zip(self.entries, self.tensors)]

    def copy_in(self, tensor, device):
        """Appends the tensor to the flat one, which grows by doubling: a small update then takes little GPU memory."""
        import torch

        at, size = self.entries[-1][3:]
        if self.flat is None or self.flat.numel() < at + size:
            least = self.capacity if self.flat is None else 2 * self.flat.numel()
            grown = torch.empty(max(at + size, least), dtype=torch.uint8, device=device)
            if at > 0:
                grown[:at].copy_(self.flat[:at])
            self.flat = grown
        self.flat[at : at + size].copy_(tensor.contiguous().view(-1).view(torch.uint8))


def collect(bucket):
    """Lets torch free the CUDA IPC memory whose references the server has released."""
    tensor = bucket.flat if bucket.flat is not None else next(iter(bucket.tensors), None)
    if tensor is not None and tensor.device.type == "cuda":
        import torch

        torch.cuda.ipc_collect()


def synchronize(bucket):
    """Waits for the GPU: kept memory has no event that the server could wait for."""
    tensor = bucket.flat if bucket.flat is not None else next(iter(bucket.tensors), None)
    if tensor is not None and tensor.device.type == "cuda":
        import torch

        torch.cuda.synchronize(tensor.device)
