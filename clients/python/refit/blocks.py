"""The blocks that a rank of a trainer packs for the engine, chunk by chunk."""

from collections import deque

ALIGNMENT = 16


class Schedule:
    """This rank's messages of a plan, which are the same in every update.

    plan: the columns of GET /shard_plans/ID/sources/RANK. dtypes: of the bytes that are sent, by the place in the
    announcement. kinds: dtypes of the shards by the same place; shards of another dtype are cast while they are copied.
    by: "blocks", one for each rank of the engine in a chunk, or "messages", of which those that are one stretch of a
    shard are sent from where they lie."""

    def __init__(self, plan, dtypes, kinds, by="blocks"):
        self.dtypes, self.kinds = dtypes, kinds
        # By chunk: the messages (rank, stretch of a shard or None, place, bytes), the copies, and their bytes.
        self.messages, self.copies, self.sizes, pieces, rest = {}, {}, {}, {}, {}
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
                pieces.setdefault(chunk, []).extend([*piece, at - offset + place] for *piece, at in own)
            self.messages.setdefault(chunk, []).append((rank, stretch, place, size))
        for chunk, own in pieces.items():
            used = {dtypes[piece[0]]: None for piece in own}
            self.copies[chunk] = [Copies(dtype, [one for one in own if dtypes[one[0]] == dtype]) for dtype in used]
        self.most = max(self.sizes.values(), default=0)

    def stretch(self, pieces, size):
        """A message where it lies in a shard, (tensor, first element, elements); None if it has to be packed."""
        (tensor, at, pitch, rows, cols, _), *others = pieces
        count = rows * cols
        if others or self.kinds[tensor] != self.dtypes[tensor] or count * self.dtypes[tensor].itemsize != size:
            return None
        return None if rows > 1 and pitch != cols else (tensor, at, count)


class Copies:
    """The pieces of one dtype in the packed bytes of a chunk, in ascending order there."""

    def __init__(self, dtype, pieces):
        self.dtype, self.end = dtype, 0
        # Elements of all stretches of the bytes, one after another; which of them are pieces; where these come from.
        self.stretches, self.taken, self.sources = [], [], []
        for tensor, at, pitch, rows, cols, offset in pieces:
            place = offset // dtype.itemsize
            if place > self.end:
                self.stretches.append(place - self.end)
            self.taken.append(len(self.stretches))
            self.stretches.append(rows * cols)
            self.end = place + rows * cols
            whole = rows == 1 or pitch == cols
            shape, strides = ((rows * cols,), (1,)) if whole else ((rows, cols), (pitch, 1))
            self.sources.append((tensor, at, shape, strides))

    def views(self, memory, locals):
        """(the pieces in the memory, where they come from)."""
        import torch

        # One call makes all views of the memory; from Python each takes longer than copying a small piece.
        stretches = torch.split(memory.view(self.dtype)[: self.end], self.stretches)
        blocks, sources = [stretches[index] for index in self.taken], []
        for index, (tensor, at, shape, strides) in enumerate(self.sources):
            local = locals[tensor]
            sources.append(torch.as_strided(local, shape, strides, local.storage_offset() + at))
            if len(shape) > 1:
                blocks[index] = blocks[index].view(shape)
        return blocks, sources


class Blocks:
    """The bytes of a schedule in one update. The memory is that of the largest of its chunks, `turns` times.

    locals: the shards by their place in the announcement."""

    def __init__(self, schedule, locals, device, turns=2):
        import torch

        self.schedule, self.locals = schedule, locals
        self.memory = [torch.zeros(schedule.most, dtype=torch.uint8, device=device) for _ in range(turns)]

    def pack(self, chunk, turn):
        """The flat tensor of a chunk's packed messages; its memory is used again `turns` chunks later."""
        memory = self.memory[turn % len(self.memory)][: self.schedule.sizes.get(chunk, 0)]
        for copies in self.schedule.copies.get(chunk, []):
            copy_all(*copies.views(memory, self.locals))
        return memory

    def take(self, chunk, turn):
        """The messages of a chunk: [(rank of the engine, flat tensor of bytes)]."""
        if chunk not in self.schedule.messages:
            return []
        out = self.pack(chunk, turn)
        return [
            (rank, out[place : place + size] if stretch is None else self.bytes_of(*stretch))
            for rank, stretch, place, size in self.schedule.messages[chunk]
        ]

    def bytes_of(self, tensor, at, count):
        import torch

        local = self.locals[tensor]
        return torch.as_strided(local, (count,), (1,), local.storage_offset() + at).view(torch.uint8)


def copy_all(blocks, sources):
    import torch

    if hasattr(torch, "_foreach_copy_"):
        torch._foreach_copy_(blocks, sources)
        return
    for block, source in zip(blocks, sources):
        block.copy_(source)
