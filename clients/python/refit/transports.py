"""The ways in which a bucket reaches the engines."""

import functools
import json
import os
import re
import time

from .bodies import SafetensorsBody
from .bucket import collect, synchronize
from .errors import LOST, EnginesFailed, RefitError
from .fan_out import submit
from .tensors import FlattenedTensorMetadata, dtype_name, handle, pickled

# One request may contain handles of this many files of shared memory. Every tensor that is not copied into a bucket
# may be a file of its own.
MOST_TENSORS = 4000
# The server keeps tensors under this many names (docs/tensor-updates.md).
MOST_KEPT = 8


class Transport:
    """How an update sends its buckets.

    Ranks of the trainer other than 0 note the entries and keep no tensors, unless they send too."""

    def __init__(self, update):
        self.update, self.ranks = update, update.ranks
        self.engines = update.engines

    def put(self, bucket, name, tensor):
        bucket.note(name, tensor)
        if self.ranks.rank == 0:
            bucket.tensors.append(tensor)

    def full(self, bucket, more):
        """Whether `more` bytes belong in the next bucket."""
        return bucket.bytes + more > self.update.bucket_bytes or len(bucket.entries) >= MOST_TENSORS

    def send(self, bucket):
        self.ranks.first(lambda: self.post(bucket))

    def end(self):
        """Runs before the commit."""


class Upload(Transport):
    """Sends a bucket as a safetensors file over HTTP."""

    def post(self, bucket):
        self.engines.each(lambda engine: engine.upload(bucket.named(), **self.update.transaction(engine)))


class File(Transport):
    """Writes shards into the folder, and an index last; the engines read them at the end. The files stay there."""

    def __init__(self, update):
        super().__init__(update)
        name = update.version or f"update-{time.time_ns()}"
        self.folder = os.path.join(update.folder, re.sub(r"[^\w.-]", "_", name))
        self.map = {}

    def post(self, bucket):
        os.makedirs(self.folder, exist_ok=True)
        name = f"model-{self.update.requests + 1:05d}.safetensors"
        self.write(name, SafetensorsBody(bucket.named()).parts())
        self.map.update((entry[0], name) for entry in bucket.entries)

    def end(self):
        self.ranks.first(self.load)

    def load(self):
        if self.map:
            index = json.dumps(dict(metadata={}, weight_map=self.map))
            self.write("model.safetensors.index.json", [index.encode()])
            folder = os.path.abspath(self.folder)
            self.engines.each(lambda engine: engine.update_from_disk(folder, **self.update.transaction(engine)))

    def write(self, name, parts):
        path = os.path.join(self.folder, name)
        with open(path + ".part", "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(path + ".part", path)


class Handles(Transport):
    """Each rank of an engine reads the memory of one rank of the trainer: that of its own number, modulo the number of
    senders. The flat tensor is reused for each bucket."""

    flat = None

    @functools.cached_property
    def infos(self):
        """For each engine ([ranks of each engine behind it], device). All ranks of the trainer read it together."""

        def first():
            infos = self.engines.each(lambda engine: engine.server_info())
            return [(ranks_behind(info), info.get("device", "cuda")) for info in infos.values()]

        return self.ranks.first(first)

    def put(self, bucket, name, tensor):
        senders = max(max(counts) for counts, _ in self.infos)
        bucket.note(name, tensor)
        if self.ranks.rank >= senders:
            return
        # An engine on the CPU cannot read GPU memory.
        device = tensor.device if all(device == "cuda" for _, device in self.infos) else "cpu"
        if self.update.in_place:
            bucket.tensors.append(tensor.to(device))
            return
        bucket.flat = self.place() if bucket.flat is None else bucket.flat
        bucket.copy_in(tensor, device)
        self.placed(bucket.flat)

    def place(self):
        return self.flat

    def placed(self, flat):
        self.flat = flat

    @property
    def retries(self):
        return self.engines.engines[0].retries

    def load_format(self):
        return None if self.update.in_place else "flattened_bucket"

    def payload(self, bucket):
        if self.update.in_place:
            return [(name, handle(tensor)) for name, tensor in bucket.named()]
        metadata = [
            FlattenedTensorMetadata(name, shape, dtype, at, at + size, size)
            for name, dtype, shape, at, size in bucket.entries
        ]
        return {"flattened_tensor": handle(bucket.flat[: bucket.bytes]), "metadata": metadata}

    def entries(self, bucket):
        """For each engine a list of texts, one for each of its ranks; the same lists on every rank of the trainer.

        A sender pickles once for each engine: the server takes equal texts as one pickle, and torch counts a pickle as
        one reader."""

        def mine():
            return {
                (index, part): pickled(self.payload(bucket))
                for index, (counts, _) in enumerate(self.infos)
                for part, count in enumerate(counts)
                if self.ranks.rank < count
            }

        every = self.ranks.every(mine)
        return [
            [every[rank % self.ranks.size][index, part] for part, count in enumerate(counts) for rank in range(count)]
            for index, (counts, _) in enumerate(self.infos)
        ]

    def send(self, bucket):
        self.offer(bucket)

    def offer(self, bucket, **fields):
        fields = dict(fields, load_format=self.load_format())
        retries = self.retries
        for attempt in range(retries + 1):
            texts = dict(zip(self.engines.engines, self.entries(bucket)))
            try:
                self.ranks.first(lambda: self.post(texts, fields))  # noqa: B023
                return
            except RefitError as error:
                for failed in error.errors.values() if isinstance(error, EnginesFailed) else [error]:
                    if getattr(failed, "code", None) == "UNREACHABLE":
                        self.release(bucket)
                # The next attempt makes new handles: the server has released those that it has seen.
                if error.code not in LOST or attempt == retries:
                    raise
                time.sleep(0.2 * 2**attempt)
            finally:
                collect(bucket)

    def post(self, texts, fields):
        self.engines.each(
            lambda engine: engine.update_from_tensors(texts[engine], **fields, **self.update.transaction(engine))
        )

    def release(self, bucket):
        """Releases the references of a request that no server received."""
        for tensor in [bucket.flat] if bucket.flat is not None else bucket.tensors:
            if tensor.device.type == "cpu":
                tensor.untyped_storage()._shared_decref()


class Kept(Handles):
    """The first update sends handles, which the engines keep open; later updates only name them.

    Each bucket has a flat tensor of its own that stays, or (in_place) its tensors stay where they are. If the memory or
    the layout changed, or the server has closed the memory, the update sends handles again."""

    def place(self):
        held = self.store().get(self.key())
        return None if held is None else held["flat"]

    def key(self):
        """Names the use of the memory in this client."""
        return self.update.requests

    def placed(self, flat):
        pass

    def full(self, bucket, more):
        # The last of the available names takes all remaining tensors.
        return self.update.requests + 1 < MOST_KEPT and super().full(bucket, more)

    def store(self):
        return self.engines.engines[0].kept

    def send(self, bucket):
        key = self.key()
        held = self.store().get(key)
        if all(self.ranks.gather(held is not None and held["layout"] == self.layout(bucket))):
            synchronize(bucket)
            if self.ranks.first(lambda: self.again(held)):
                return
        generation = time.time_ns() // 1000
        name = held["name"] if held is not None else f"{self.engines.engines[0].owner} {key}"[:200]
        name, generation = self.ranks.first(lambda: (name, generation))
        # Forget it before the offer: the server may still keep older memory under the name.
        self.store().pop(key, None)
        self.offer(bucket, keep=dict(name=name, generation=generation))
        # Take the layout after the offer: sharing moves CPU memory.
        kept = dict(layout=self.layout(bucket), flat=bucket.flat, tensors=list(bucket.tensors))
        self.store()[key] = dict(name=name, generation=generation, **kept)

    def layout(self, bucket):
        """The kept memory can be used again if this is unchanged."""
        if bucket.flat is not None:
            places = [bucket.flat.data_ptr()]
        else:
            places = [(tensor.data_ptr(), tensor.stride()) for tensor in bucket.tensors]
        return bucket.entries, places, self.infos

    def again(self, held):
        """Whether all engines still had the memory open, and have written it."""
        try:
            self.post_kept(dict(name=held["name"], generation=held["generation"]))
        except RefitError as error:
            errors = error.errors.values() if isinstance(error, EnginesFailed) else [error]
            if all(isinstance(one, RefitError) and is_gone(one) for one in errors):
                return False
            raise
        return True

    def post_kept(self, kept):
        def write(engine):
            body = dict(kept=kept, **self.update.transaction(engine))
            return engine.json("POST", "/update_weights_from_tensor", body, admin=True, retry=True)

        self.engines.each(write)


def ranks_behind(info):
    """The number of ranks of each engine behind a server: of a gateway's engines, or of the server itself."""
    if "engines" in info:
        return [engine["ranks"] for engine in info["engines"] if engine["state"] in ("ready", "stale")]
    return [info["tp_size"] * info.get("pp_size", 1)]


def is_gone(error):
    """Whether the server does not keep the memory of this name and generation."""
    return error.code in ("NOT_FOUND", "CONFLICT") or "has ended" in error.message


class Broadcast(Transport):
    """Rank 0 announces a bucket and broadcasts its flat tensor in the process group."""

    def __init__(self, update):
        super().__init__(update)
        self.flat = None
        if getattr(update.group, "all_ranks", False):
            update.group.join()
        else:
            self.ranks.first(lambda: update.group.join())

    def put(self, bucket, name, tensor):
        bucket.note(name, tensor)
        if self.ranks.rank == 0:
            bucket.flat = self.flat if bucket.flat is None else bucket.flat
            bucket.copy_in(tensor, self.update.group.device)
            self.flat = bucket.flat

    def post(self, bucket):
        about = dict(
            names=[entry[0] for entry in bucket.entries],
            dtypes=[dtype_name(entry[1]) for entry in bucket.entries],
            shapes=[list(entry[2]) for entry in bucket.entries],
            group_name=self.update.group.name,
            load_format="flattened_bucket",
        )

        def announce(engine):
            body = dict(about, **self.update.transaction(engine))
            return engine.json("POST", "/update_weights_from_distributed", body, admin=True)

        self.update.group.broadcast(bucket.flat[: bucket.bytes], submit(self.engines.engines, announce))


TRANSPORTS = {"handles": Handles, "kept": Kept, "upload": Upload, "group": Broadcast, "file": File}
