"""LoRA adapters: from PEFT's form to one load on each engine."""

import hashlib
import json
import os
import re
import time
import urllib.parse

from .adapter_digest import AdapterDigest
from .adapter_source import adapter_of
from .bodies import FormBody, JsonBody, PathBody, SafetensorsBody
from .bucket import Bucket
from .errors import RefitError
from .fan_out import results, submit
from .ranks import Ranks
from .tensors import dtype_name, full
from .transports import Broadcast, File, Handles, Kept, Transport, Upload
from .update import choose

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class AdapterLoad:
    """One load of an adapter on each engine. An engine takes all of it or nothing, so there is no transaction.

    It has what transports read of an update. The parameters are those of Engines.add_adapter."""

    in_place = False
    requests = 0

    def __init__(
        self, engines, name, adapter, transport="auto", replace=True, pinned=False, verify=False, dtype=None,
        process_group=None, group=None, folder=None, adapter_name=None,
    ):  # fmt: skip
        if not isinstance(name, str) or name == "":
            raise ValueError(f"name: expected a text, got {name!r}")
        if transport != "auto" and transport not in TRANSPORTS:
            raise ValueError(f"transport: expected auto or one of {', '.join(TRANSPORTS)}, got {transport!r}")
        if transport == "group" and group is None:
            raise ValueError("transport 'group' needs group=")
        self.engines, self.name, self.group, self.folder = engines, name, group, folder
        self.replace, self.dtype = replace, dtype
        self.fields = dict(lora_name=name, pinned=pinned)
        self.ranks = Ranks(process_group)
        self.path = os.path.abspath(adapter) if isinstance(adapter, (str, os.PathLike)) else None
        self.config, self.tensors = adapter_of(adapter, adapter_name, with_tensors=self.path is None or verify)
        if self.path is None and transport == "file" and folder is None:
            raise ValueError("transport 'file' needs folder=")
        if self.path is not None and transport in ("handles", "kept", "group"):
            raise ValueError(f"transport: a folder is sent by 'upload' or 'file', got {transport!r}")
        self.transport, self.wants_digest = transport, verify
        self.reports = None

    def run(self):
        """{engine: its report}, on every rank."""
        infos = self.ranks.first(self.infos)
        if self.transport == "auto":
            self.transport = self.ranks.first(self.choose)
        digests = self.digests(infos)
        transport = TRANSPORTS[self.transport](self)
        bucket = Bucket(sum(tensor.numel() * self.width(tensor) for _, tensor in self.tensors))
        for name, tensor in self.tensors:
            # No more than one gathered tensor is alive beside the adapter.
            tensor = full(tensor)
            tensor = tensor if self.dtype is None else tensor.to(self.dtype)
            if self.path is None:
                transport.put(bucket, name, tensor)
            for digest in digests.values():
                digest.add(name, tensor)
        transport.send(bucket)
        reports = self.ranks.first(lambda: [self.reports[engine] for engine in self.engines.engines])
        self.ranks.first(lambda: self.check(reports, infos, digests))
        return dict(zip(self.engines.engines, reports))

    def infos(self):
        """The engines' reports of themselves, which a digest depends on."""
        if not self.wants_digest:
            return [{} for _ in self.engines.engines]
        return list(self.engines.each(lambda engine: engine.server_info()).values())

    def choose(self):
        if self.path is not None:
            return "upload"
        return choose(self.engines, self.group, self.folder)

    def width(self, tensor):
        return tensor.element_size() if self.dtype is None else self.dtype.itemsize

    def digests(self, infos):
        """A digest for each dtype that engines hold adapters in."""
        if not self.wants_digest:
            return {}
        dtypes = {info.get("dtype") for info in infos}
        if None in dtypes:
            raise ValueError("verify: a server does not report its dtype")
        if self.ranks.rank > 0:
            return {}
        return {dtype: AdapterDigest(self.config, dtype) for dtype in dtypes}

    def check(self, reports, infos, digests):
        """Raises BAD_REPLY for a load of something else than what was sent."""
        for engine, report, info in zip(self.engines.engines, reports, infos):
            problem = None
            if report.get("name") != self.name or not isinstance(report.get("version"), int):
                problem = f"expected a report of {self.name!r}, got {str(report)[:200]}"
            elif self.tensors and report["tensors"] != len(self.tensors):
                problem = f"{len(self.tensors)} tensors were sent, and the engine has written {report['tensors']}"
            elif digests and report["digest"] != (digest := digests[info["dtype"]].value()):
                problem = f"the digest here is {digest}, and the engine's is {report['digest']}"
            if problem is not None:
                raise RefitError(200, "BAD_REPLY", f"LoRA adapter {self.name!r}: {problem}", url=engine.url)

    def post(self, engine, path, retry=False, **fields):
        """The report of a route of SGLang's."""
        reply = engine.json("POST", path, {**self.fields, **fields}, admin=True, retry=retry)
        return reply.get("adapter") or {}

    def upload(self, engine, files):
        query = dict(existing="replace" if self.replace else "refuse", pinned=str(self.fields["pinned"]).lower())
        body = FormBody({}, files, numbered=False)
        headers = {"content-type": f"multipart/form-data; boundary={body.boundary}"}
        path = f"{adapter_path(self.name)}?{urllib.parse.urlencode(query)}"
        # A load whose reply was lost may have taken the name already.
        return engine.json(
            "POST", path, body.parts, length=body.length, headers=headers, admin=True, retry=self.replace
        )

    def of_tensors(self):
        return dict(config_dict=self.config, upsert=self.replace)


class AdapterHandles(Handles):
    @property
    def retries(self):
        return super().retries if self.update.replace else 0

    def post(self, texts, fields):
        load, path = self.update, "/load_lora_adapter_from_tensors"
        load.reports = self.engines.each(
            lambda engine: load.post(
                engine, path, serialized_named_tensors=texts[engine], **load.of_tensors(), **fields
            )
        )


class AdapterKept(Kept, AdapterHandles):
    """Adapters of the same names, dtypes and shapes share the kept memory, under whatever names they are loaded."""

    def key(self):
        load = self.update
        about = [(name, str(load.dtype or tensor.dtype), list(tensor.shape)) for name, tensor in load.tensors]
        return f"adapter {hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]}"

    def post_kept(self, kept):
        load, path = self.update, "/load_lora_adapter_from_tensors"
        load.reports = self.engines.each(
            lambda engine: load.post(engine, path, retry=load.replace, kept=kept, **load.of_tensors())
        )


class AdapterUpload(Upload):
    def post(self, bucket):
        load = self.update
        if load.path is None:
            files = [JsonBody(load.config, CONFIG), SafetensorsBody(bucket.named(), WEIGHTS)]
        else:
            files = [PathBody(os.path.join(load.path, name)) for name in (CONFIG, WEIGHTS)]
        load.reports = self.engines.each(lambda engine: load.upload(engine, files))


class AdapterFile(File):
    """The engines read a folder as PEFT saves it: the caller's own, or one that is written first and stays there."""

    def __init__(self, load):
        Transport.__init__(self, load)
        name = re.sub(r"[^\w-]", "_", load.name)
        self.folder = load.path or os.path.join(os.path.abspath(load.folder), f"{name}-{time.time_ns()}")

    def post(self, bucket):
        load = self.update
        if load.path is None:
            os.makedirs(self.folder)
            self.write(CONFIG, [json.dumps(load.config).encode()])
            self.write(WEIGHTS, SafetensorsBody(bucket.named()).parts())
        body = dict(lora_path=self.folder, load_inplace=load.replace)
        load.reports = self.engines.each(
            lambda engine: load.post(engine, "/load_lora_adapter", retry=load.replace, **body)
        )


class AdapterBroadcast(Broadcast):
    def post(self, bucket):
        load = self.update
        about = dict(
            names=[entry[0] for entry in bucket.entries],
            dtypes=[dtype_name(entry[1]) for entry in bucket.entries],
            shapes=[list(entry[2]) for entry in bucket.entries],
            group_name=load.group.name,
            load_format="flattened_bucket",
            **load.of_tensors(),
        )
        path = "/load_lora_adapter_from_distributed"
        replies = submit(self.engines.engines, lambda engine: load.post(engine, path, **about))
        load.group.broadcast(bucket.flat[: bucket.bytes], replies)
        load.reports = results(replies)


TRANSPORTS = {
    "handles": AdapterHandles,
    "kept": AdapterKept,
    "upload": AdapterUpload,
    "group": AdapterBroadcast,
    "file": AdapterFile,
}


def adapter_path(name):
    return f"/adapters/{urllib.parse.quote(name, safe='')}"
