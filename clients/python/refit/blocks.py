"""The blocks that a rank of a trainer packs for the engine, chunk by chunk."""

from collections import deque

ALIGNMENT = 16


class Blocks:
    """This rank's messages of a plan. The memory is that of the largest of its chunks, `turns` times.

    plan: the columns of GET /shard_plans/ID/sources/RANK. locals: the shards by their place in the announcement.
    dtypes: of the bytes that are sent, by the same place; shards of another dtype are cast while they are copied.
    by: "blocks", one for each rank of the engine in a chunk, or "messages", of which those that are one stretch of a
    shard are sent from where they lie."""

    def __init__(self, plan, locals, dtypes, device, turns=2, by="blocks"):
        import torch

        self.locals, self.dtypes = locals, dtypes
        # By chunk: the messages (rank, stretch of a shard or None, place, bytes), the copies, and their bytes.
        self.blocks, self.pieces, self.sizes, rest = {}, {}, {}, {}
        keys = ("chunk", "tensor", "at", "pitch", "rows", "cols", "offset")
        for chunk, *piece in zip(*(plan["pieces"][key] for key in keys)):
            rest.setdefault(chunk, deque()).append(piece)
        for chunk, rank, offset, size in zip(*(plan[by][key] for key in ("chunk", "rank", "offset", "bytes"))):
            own = []
            while rest[chunk] and rest[chunk][0][-1] < offset + size:
                own.append(rest[chunk].popleft())
            stretch, place = self.stretch(own, size) if by == "messages" else None, self.sizes.get(chunk, 0)
            if stretch is None:
                self.sizes[chunk] = place + -(-size // ALIGNMENT) * ALIGNMENT
                self.pieces.setdefault(chunk, []).extend([*piece, at - offset + place] for *piece, at in own)
            self.blocks.setdefault(chunk, []).append((rank, stretch, place, size))
        most = max(self.sizes.values(), default=0)
        self.memory = [torch.zeros(most, dtype=torch.uint8, device=device) for _ in range(turns)]

    def stretch(self, pieces, size):
        """The bytes of a message where they lie in a shard; None if they have to be packed."""
        import torch

        (tensor, at, pitch, rows, cols, _), *others = pieces
        local, dtype = self.locals[tensor], self.dtypes[tensor]
        count = rows * cols
        if others or local.dtype != dtype or count * dtype.itemsize != size or (rows > 1 and pitch != cols):
            return None
        return torch.as_strided(local, (count,), (1,), local.storage_offset() + at).view(torch.uint8)

    def pack(self, chunk, turn):
        """The flat tensor of a chunk's packed messages; its memory is used again `turns` chunks later."""
        import torch

        out = self.memory[turn % len(self.memory)][: self.sizes.get(chunk, 0)]
        for tensor, at, pitch, rows, cols, offset in self.pieces.get(chunk, []):
            dtype, local = self.dtypes[tensor], self.locals[tensor]
            size = rows * cols * dtype.itemsize
            block = out[offset : offset + size].view(dtype).view(rows, cols)
            block.copy_(torch.as_strided(local, (rows, cols), (pitch, 1), local.storage_offset() + at))
        return out

    def take(self, chunk, turn):
        """The messages of a chunk: [(rank of the engine, flat tensor of bytes)]."""
        out = self.pack(chunk, turn)
        return [
            (rank, out[place : place + size] if stretch is None else stretch)
            for rank, stretch, place, size in self.blocks.get(chunk, [])
        ]
