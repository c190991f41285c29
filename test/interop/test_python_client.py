"""clients/python/refit against a real server, with real torch: weights arrive by every transport bit for bit."""

import json
import pathlib

import pytest
import safetensors.torch
import torch

from python_client import WAYS, brought, options_of, refit
from tensors import coded

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_a_b_a_arrives_bit_for_bit_by_every_transport(engine_of, model_of, shared_folder, way, ranks):
    model, client = model_of("qwen3"), refit.Client(engine_of("qwen3", ranks).url)
    options, group = options_of(way, client, shared_folder)
    client.check_weights("reset_tensors")
    # The same memory each time, as in a trainer.
    named = model.tensors(1)
    for step, variant in enumerate([1, 2, 1]):
        for (name, tensor), (_, values) in zip(named, model.tensors(variant)):
            tensor.copy_(values)
        version = f"{way} {step}"
        with client.update(version=version, bucket_bytes=30_000, expected="all", **options) as update:
            update.add_all(named)
        brought(client, model, variant)
        assert client.version() == version
        assert update.outcome == {client.url: "new"} and update.tensors == len(named)
        # A bucket closes before it exceeds its limit. A larger tensor is alone in its bucket.
        assert update.requests > 3 or way.startswith("kept")
    if group:
        group.leave()
    if client.kept:
        assert len(client.release_kept()) > 0


def test_kept_tensors_are_sent_once_and_named_afterwards(engine_of, model_of, monkeypatch):
    model, client = model_of("qwen3"), refit.Client(engine_of().url)
    offered = []
    monkeypatch.setattr(refit.transports, "pickled", lambda obj, real=refit.pickled: offered.append(1) or real(obj))

    def update(variant, names=None):
        offered.clear()
        with client.update(transport="kept", version=str(variant)) as made:
            made.add_all((name, tensor) for name, tensor in model.tensors(variant) if names is None or name in names)
        return len(offered)

    assert update(1) == 1, "one pickle: one bucket for one rank"
    assert update(2) == 0
    brought(client, model, 2)
    client.call("POST", "/release_kept_tensors", {})
    assert update(3) == 1, "the server had forgotten: handles again"
    brought(client, model, 3)
    assert update(1, names=["model.norm.weight"]) == 1, "another layout: handles again"
    assert client.checksums()["model.norm.weight"] == model.checksums(1)["model.norm.weight"]
    assert update(2) == 1
    brought(client, model, 2)
    client.release_kept()


def test_buckets_beyond_the_limit_of_kept_names_share_the_last_one(engine_of, model_of):
    model, client = model_of("qwen3"), refit.Client(engine_of().url)
    for variant in (3, 4):
        with client.update(transport="kept", bucket_bytes=1000) as update:
            update.add_all(model.tensors(variant))
        assert update.requests == refit.MOST_KEPT
        brought(client, model, variant)
    client.release_kept()


def test_the_process_keeps_its_own_sharing_strategy(engine_of, model_of):
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_descriptor")
    try:
        model, client = model_of("qwen3"), refit.Client(engine_of().url)
        with client.update() as update:
            update.add_all(model.tensors(5))
        assert update.transport == "handles", "an engine of this machine is sent handles"
        brought(client, model, 5)
        assert torch.multiprocessing.get_sharing_strategy() == "file_descriptor"
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


def test_a_slow_manager_of_shared_memory_is_asked_again(engine_of, model_of, monkeypatch):
    """torch waits one second for it."""
    model, client = model_of("qwen3"), refit.Client(engine_of().url)
    share, late = torch.UntypedStorage.share_memory_, []

    def slow(storage):
        if late:
            late.pop()
            raise RuntimeError("Shared memory manager connection has timed out\nException raised from recv")
        return share(storage)

    monkeypatch.setattr(torch.UntypedStorage, "share_memory_", slow)

    def update(variant, failures):
        late[:] = range(failures)
        with client.update(transport="handles") as made:
            made.add_all(model.tensors(variant))

    for variant, failures in [(1, 1), (2, 29)]:
        update(variant, failures)
        assert late == []
        brought(client, model, variant)
    with pytest.raises(RuntimeError, match="manager connection has timed out"):
        update(3, 30)
    brought(client, model, 2)


def test_one_file_is_uploaded_as_the_body_and_several_as_a_form(engine_of, model_of, tmp_path):
    model, client = model_of("qwen3"), refit.Client(engine_of().url)
    named = model.tensors(7)
    paths = [tmp_path / "model-00001-of-00002.safetensors", tmp_path / "model-00002-of-00002.safetensors"]
    for path, part in zip(paths, (named[:9], named[9:])):
        safetensors.torch.save_file(dict(part), path)
    assert client.upload(*paths, version="form")["upload"]["files"] == 2
    brought(client, model, 7)
    whole = tmp_path / "whole.safetensors"
    safetensors.torch.save_file(dict(model.tensors(8)), whole)
    assert client.upload(whole, version="file", flush_cache=False, abort_all_requests=True)["upload"]["files"] == 1
    brought(client, model, 8)
    client.upload(named[:4], named[4:], version="tensors")
    brought(client, model, 7)
    assert client.version() == "tensors"
    body = refit.SafetensorsBody(named)
    written = safetensors.torch.load(b"".join(body.parts()))
    assert body.length == sum(len(part) for part in body.parts()) and all(
        torch.equal(written[name], tensor) for name, tensor in named
    )
    with pytest.raises(TypeError, match="int8"):
        refit.SafetensorsBody([("x", torch.zeros(2, dtype=torch.int8))])


def test_an_update_by_files_writes_a_checkpoint(engine_of, model_of, shared_folder):
    model, client = model_of("qwen3"), refit.Client(engine_of().url)
    with client.update(version="step/1", folder=shared_folder, bucket_bytes=100_000) as update:
        update.add_all(model.tensors(2))
    folder = pathlib.Path(shared_folder, "step_1")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert not list(folder.glob("*.part")) and set(index) == set(model.shapes)
    for name, file in index.items():
        assert torch.equal(safetensors.torch.load_file(folder / file)[name], coded(2, name, model.shapes[name]))


def test_odd_views_and_dtypes(engine_of, model_of):
    model, client = model_of("qwen3"), refit.Client(engine_of().url)
    for way in ("handles", "upload", "handles in place", "kept"):
        named = [
            (name, tensor.t().contiguous().t() if tensor.dim() == 2 else torch.stack([tensor, tensor], 1)[:, 0])
            for name, tensor in model.tensors(9)
        ]
        with client.update(transport=way.split(" ")[0], in_place=" " in way) as update:
            for index, (name, tensor) in enumerate(named):
                update.add(name, tensor.to(torch.float32) if index % 3 == 0 else tensor)
        brought(client, model, 9)
        client.check_weights("reset_tensors")
    with pytest.raises(ValueError, match="merge_and_unload"):
        layer = torch.nn.Module()
        layer.lora_A = torch.nn.Linear(2, 2)
        with client.update() as update:
            update.add_all(layer)
    with client.update() as update:
        update.add_all(model.tensors(1))
    client.release_kept()
