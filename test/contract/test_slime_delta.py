"""slime's deltas on disk: it publishes changes, every host updates its own checkpoint, and engines load that."""

import json
import shutil
import threading

import pytest
import safetensors
import safetensors.numpy
import safetensors.torch

np = pytest.importorskip("numpy")
zstandard = pytest.importorskip("zstandard")
pytest.importorskip("xxhash")

import published  # noqa: E402
from engines import GOLDENS, Beside, settled  # noqa: E402
from published import CHECKSUMS, KIND, data_of, holds  # noqa: E402
from slime_client import Failed, SlimeEngine, SlimeEngines  # noqa: E402

DELTA = pytest.mark.row(5, "slime / disk delta")


class Publisher(published.Publisher):
    """slime's trainer."""

    def __init__(self, folder, encoding="xor", checksum="xxh3-128"):
        super().__init__()
        self.folder, self.encoding, self.checksum = folder, encoding, checksum

    def publish(self, new=None, files=2):
        new = new or self.next()
        self.version += 1
        folder = self.folder / f"weight_v{self.version:06d}"
        folder.mkdir()
        changed = []
        for name, tensor in new.items():
            data, old = (np.frombuffer(data_of(each), np.uint8) for each in (tensor, self.snapshot[name]))
            if (data == old).all():
                continue
            if self.encoding == "xor":
                diff = (data ^ old).tobytes()
            else:
                at = np.flatnonzero(data != old).astype("<u4")
                diff = np.array([at.size], "<u4").tobytes() + at.tobytes() + data[at].tobytes()
            changed.append(
                (
                    name,
                    np.frombuffer(zstandard.ZstdCompressor(level=1).compress(diff), np.uint8),
                    CHECKSUMS[self.checksum](data.tobytes()),
                )
            )
        where = {}
        for number in range(files):
            part = changed[number::files]
            file = f"model-{number:05d}-of-{files:05d}.safetensors"
            safetensors.numpy.save_file(
                {name: diff for name, diff, _ in part},
                folder / file,
                metadata={name: digest for name, _, digest in part},
            )
            where.update({name: file for name, *_ in part})
        metadata = dict(
            version=f"{self.version:06d}",
            base_version=f"{self.version - 1:06d}",
            delta_encoding=self.encoding,
            compression_format="zstd",
            checksum_format=self.checksum,
        )
        (folder / "model.safetensors.index.json").write_text(json.dumps(dict(metadata=metadata, weight_map=where)))
        self.snapshot = new
        return folder

    def publish_whole(self, new):
        self.version += 1
        folder = self.folder / f"weight_v{self.version:06d}"
        folder.mkdir()
        shutil.copy(GOLDENS / KIND / "config.json", folder)
        safetensors.torch.save_file(new, folder / "model.safetensors")
        self.snapshot = new


def reload(clients, local, version):
    """Pulls before the pause, then updates within it."""
    clients.all("pull_weights", local, local.parent / "published", version)
    clients.all("pause_generation")
    clients.all("flush_cache")
    clients.all("update_weights_from_disk", local, str(version))
    clients.all("continue_generation")


@DELTA
@pytest.mark.brings("files")
@pytest.mark.parametrize("encoding, checksum", [("xor", "xxh3-128"), ("overwrite", "adler32")])
def test_every_host_follows_what_is_published(host, encoding, checksum):
    made, root = host
    clients, local = SlimeEngines(*(engine.url for engine in made)), root / "local"
    publisher = Publisher(root / "published", encoding, checksum)
    # The first update publishes nothing: version 0 is the checkpoint that the engines started with.
    assert {reply["success"] for reply in clients.all("pull_weights", local, root / "published", 0)} == {True}
    for engine in made:
        engine.spoil()
    reload_zero = clients.all("update_weights_from_disk", local, "0")
    assert all(reply["success"] for reply in reload_zero)
    for engine in made:
        holds(engine, publisher.snapshot)
    for _ in range(3):
        publisher.publish()
        reload(clients, local, publisher.version)
        for engine, client in zip(made, clients.each):
            holds(engine, publisher.snapshot)
            assert client.get_weight_version() == str(publisher.version)
            assert client.generate([5, 6, 7])["meta_info"]["weight_version"] == str(publisher.version)
    assert json.loads((local / ".weight_sync/state.json").read_text())["version"] == "000003"
    # A host that joins later pulls all versions at once. A whole version in between makes the earlier ones unnecessary.
    publisher.publish_whole(publisher.next())
    publisher.publish()
    shutil.rmtree(root / "published/weight_v000002")
    clients.each[0].pull_weights(root / "late", root / "published", publisher.version)
    clients.each[0].update_weights_from_disk(root / "late", "late")
    holds(made[0], publisher.snapshot)


@DELTA
def test_generation_goes_on_while_weights_are_pulled(host):
    made, root = host
    client, publisher = SlimeEngine(made[0].url), Publisher(root / "published")
    client.pull_weights(root / "local", root / "published", 0)
    over, done, version = threading.Event(), [], client.get_weight_version()

    def ask():
        while not over.is_set():
            done.append(client.generate([5, 6, 7])["meta_info"]["finish_reason"]["type"])

    asking = Beside(ask)
    for _ in range(3):
        publisher.publish()
        before = len(done)
        client.pull_weights(root / "local", root / "published", publisher.version)
        assert client.get_weight_version() == version, "a pull changes no weights of the engine"
        settled(lambda: len(done), lambda count: count > before or asking.done)
        assert not asking.done, asking.error
    over.set()
    asking.result()
    assert len(done) > before and set(done) <= {"stop", "length"}


@DELTA
@pytest.mark.brings("files")
def test_a_version_with_a_wrong_checksum_is_refused_and_the_next_pull_repairs_it(host):
    made, root = host
    client, local, source = SlimeEngine(made[0].url), root / "local", root / "published"
    publisher = Publisher(source)
    client.pull_weights(local, source, 0)
    folder = publisher.publish()
    good = {path.name: path.read_bytes() for path in folder.iterdir()}
    file = next(folder.glob("model-00000*"))
    with safetensors.safe_open(file, "np") as opened:
        named, digests = {name: opened.get_tensor(name) for name in opened.keys()}, dict(opened.metadata())
    first = next(iter(named))
    # A wrong checksum; a truncated stream; an unknown tensor.
    broken = [
        (named, {**digests, first: "0" * 32}),
        ({**named, first: named[first][:-3]}, digests),
        ({**named, "model.no_such.weight": named[first]}, {**digests, "model.no_such.weight": ""}),
    ]
    for tensors, metadata in broken:
        safetensors.numpy.save_file(tensors, file, metadata=metadata)
        with pytest.raises(Failed, match=r'400: \{"success":false,"message":"'):
            client.pull_weights(local, source, 1)
        file.write_bytes(good[file.name])
        client.pull_weights(local, source, 1)
        client.update_weights_from_disk(local, "1")
        holds(made[0], publisher.snapshot)
        shutil.rmtree(local)
        client.pull_weights(local, source, 0)
    # It was killed in the middle: a second xor would revert the change.
    client.pull_weights(local, source, 1)
    (local / ".weight_sync/changing").write_text("1")
    (local / ".weight_sync/state.json").write_text('{"version": "000000"}')
    client.pull_weights(local, source, 1)
    client.update_weights_from_disk(local, "1")
    holds(made[0], publisher.snapshot)


@DELTA
def test_folders_must_be_below_the_model_roots(host, tmp_path):
    made, root = host
    client = SlimeEngine(made[0].url)
    for local, source, version in [
        (tmp_path / "elsewhere", root / "published", 0),
        (root / "local", tmp_path, 1),
        (root / "local", root / "published", 7),
        (GOLDENS / KIND, root / "published", 0),
        (root / "published", root / "published", 1),
        (root / "no/such/parent", root / "published", 0),
    ]:
        with pytest.raises(Failed, match="400"):
            client.pull_weights(local, source, version)
    assert not (tmp_path / "elsewhere").exists()
    assert (GOLDENS / KIND / "config.json").exists() and not (GOLDENS / KIND / ".weight_sync").exists()
