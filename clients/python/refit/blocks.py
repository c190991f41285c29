"""The blocks that a rank of a trainer packs for the engine, chunk by chunk."""


class Blocks:
    """This rank's blocks of a plan. The memory is that of the largest of its parts, `turns` times.

    plan: the columns of GET /shard_plans/ID/sources/RANK. locals: the shards by their place in the announcement.
    dtypes: of the bytes that are sent, by the same place; shards of another dtype are cast while they are copied."""

    def __init__(self, plan, locals, dtypes, device, turns=2):
        import torch

        self.locals, self.dtypes = locals, dtypes
        self.blocks, self.pieces = {}, {}
        for chunk, rank, offset, size in zip(*(plan["blocks"][key] for key in ("chunk", "rank", "offset", "bytes"))):
            self.blocks.setdefault(chunk, []).append((rank, offset, size))
        keys = ("chunk", "tensor", "at", "pitch", "rows", "cols", "offset")
        for chunk, *piece in zip(*(plan["pieces"][key] for key in keys)):
            self.pieces.setdefault(chunk, []).append(piece)
        self.sizes = {chunk: blocks[-1][1] + blocks[-1][2] for chunk, blocks in self.blocks.items()}
        most = max(self.sizes.values(), default=0)
        self.memory = [torch.zeros(most, dtype=torch.uint8, device=device) for _ in range(turns)]

    def pack(self, chunk, turn):
        """The flat tensor of a chunk's blocks; its memory is used again `turns` chunks later."""
        import torch

        out = self.memory[turn % len(self.memory)][: self.sizes[chunk]]
        for tensor, at, pitch, rows, cols, offset in self.pieces[chunk]:
            dtype, local = self.dtypes[tensor], self.locals[tensor]
            size = rows * cols * dtype.itemsize
            block = out[offset : offset + size].view(dtype).view(rows, cols)
            block.copy_(torch.as_strided(local, (rows, cols), (pitch, 1), local.storage_offset() + at))
        return out
