"""SkyRL's delta mode: it publishes changes, hosts update their checkpoints before the pause, engines load in it."""

import json
import shutil
import threading

import pytest

pytest.importorskip("zstandard")
pytest.importorskip("xxhash")

from engines import GOLDENS, Beside, refusal, settled  # noqa: E402
from published import KIND, holds  # noqa: E402
from skyrl_publisher import Publisher  # noqa: E402
from test_skyrl import Client, until  # noqa: E402

DELTA = pytest.mark.row(14, "SkyRL / delta")


class DeltaClient(Client):
    def fetch(self, told):
        return self.call("/fetch_weights", {name: told[name] for name in ("target_version", "sync_dir", "uri")})

    def update(self, told):
        return self.call("/update_weights", dict(update_info=told))


class Clients:
    """Each call goes to all servers at the same time."""

    def __init__(self, made):
        self.each = [DeltaClient(engine) for engine in made]

    def all(self, call):
        return [beside.result() for beside in [Beside(lambda client=client: call(client)) for client in self.each]]

    def send(self, told, reset=True, meanwhile=lambda: None):
        """_apply_receiver_update: fetches before the pause, and always resumes generation."""
        fetched = self.all(lambda client: client.fetch(told))
        self.all(lambda client: client.pause())
        try:
            meanwhile()
            if reset:
                self.all(lambda client: client.reset())
            self.all(lambda client: client.start())
            self.all(lambda client: client.update(told))
            self.all(lambda client: client.finish())
        finally:
            self.all(lambda client: client.resume())
        return fetched


def state(root):
    return json.loads((root / "local/.skyrl_weight_sync/state.json").read_text())


@DELTA
@pytest.mark.brings("files")
@pytest.mark.parametrize("checksum", ["xxh3-128", "sha256"])
def test_every_host_follows_what_is_published(host, checksum):
    made, root = host
    clients, publisher = Clients(made), Publisher(root / "published", checksum=checksum)
    assert [client.world_size() for client in clients.each] == [1, 2]
    clients.all(lambda client: client.init(publisher.init_info(root / "local")))
    for _ in range(3):
        told = publisher.publish()
        for reply, engine in zip(clients.send(told), made):
            assert reply["status"] == "ok" and len(reply["result"]) == engine.ranks
            assert all(
                rank["status"] == "ok" and rank["target_version"] == publisher.version for rank in reply["result"]
            )
        for engine in made:
            holds(engine, publisher.snapshot)
            assert engine.version() == str(publisher.version)
    assert len(list((root / "published/delta-00000001").iterdir())) > 2, "changes lie in several files"
    # One folder for the host, as with SkyRL's receiver.
    assert (
        dict(version=3, write_in_progress=False, target_version=None, base_model_path=str(GOLDENS / KIND)).items()
        <= state(root).items()
    )
    # A version without changes is published as well.
    clients.send(publisher.publish(new=dict(publisher.snapshot)))
    holds(made[1], publisher.snapshot)
    # A host that joins later fetches all versions at once.
    late = clients.each[0]
    late.init(publisher.init_info(root / "late"))
    assert late.fetch(publisher.told())["result"][0]["tensors"] > 0
    made[0].spoil()
    late.start()
    late.update(publisher.told())
    late.finish()
    holds(made[0], publisher.snapshot)


@DELTA
@pytest.mark.brings("files")
def test_weights_are_fetched_while_generation_goes_on_and_requests_are_frozen_while_they_are_loaded(host):
    made, root = host
    clients, publisher = Clients(made[:1]), Publisher(root / "published")
    client = clients.each[0]
    clients.all(lambda client: client.init(publisher.init_info(root / "local")))
    over, done = threading.Event(), []
    asking = Beside(lambda: until(over, lambda: done.append(client.generate(100, salt=str(len(done))))))
    for _ in range(3):
        told, before = publisher.publish(), len(done)
        was = made[0].version()
        client.fetch(told)
        assert made[0].version() == was, "a fetch changes no weights of the engine"
        settled(lambda: len(done), lambda count: count >= before + 2 or asking.done)
        assert not asking.done, asking.error
        clients.send(told)
    over.set()
    asking.result()
    assert all(choice["finish_reason"] == "length" and len(choice["token_ids"]) == 100 for choice in done), (
        "nobody is aborted"
    )
    holds(made[0], publisher.snapshot)


def broken_checksum(manifest):
    manifest["tensors"][0]["checksum"] = "0" * 32


def unknown_name(manifest):
    manifest["tensors"][0]["name"] = "model.no_such.weight"


def lying_size(manifest):
    manifest["tensors"][0]["uncompressed_num_bytes"] += 2


def other_base(manifest):
    manifest["base_version"] += 5


def way_out(manifest):
    manifest["tensors"][0]["payload_file"] = "../../outside.safetensors"


def link_out(manifest):
    manifest["tensors"][0]["payload_file"] = "link.safetensors"


def twice(manifest):
    manifest["tensors"].append(manifest["tensors"][0])


@DELTA
@pytest.mark.brings("files")
@pytest.mark.parametrize("harm", [broken_checksum, unknown_name, lying_size, other_base, way_out, link_out, twice])
def test_a_version_with_a_wrong_checksum_is_refused_and_the_next_fetch_repairs_it(host, tmp_path, harm):
    made, root = host
    clients, publisher = Clients(made[:1]), Publisher(root / "published")
    client = clients.each[0]
    clients.all(lambda client: client.init(publisher.init_info(root / "local")))
    clients.send(publisher.publish())
    told = publisher.publish(edit=harm)
    file = next((root / "published/delta-00000002").glob("delta-rank*"))
    shutil.copy(file, tmp_path / "outside.safetensors")
    (root / "published/delta-00000002/link.safetensors").symlink_to(tmp_path / "outside.safetensors")
    with refusal(400) as found:
        client.fetch(told)
    assert json.loads(found["body"])["error"]["message"]
    # Loading it is refused, and generation goes on with the current weights.
    client.pause()
    client.start()
    with refusal(409):
        client.update(told)
    client.resume()
    wanted = publisher.snapshot
    shutil.rmtree(root / "published/delta-00000002")
    again = Publisher(root / "published")
    again.snapshot = again.next()
    again.version = 1
    told = again.publish(new=wanted)
    clients.send(told)
    holds(made[0], wanted)


@DELTA
@pytest.mark.brings("files")
def test_a_killed_fetch_starts_again_from_the_base(host):
    made, root = host
    clients, publisher = Clients(made), Publisher(root / "published")
    clients.all(lambda client: client.init(publisher.init_info(root / "local")))
    clients.send(publisher.publish())
    told = publisher.publish()
    # In the middle of a change: a second xor would revert the first.
    clients.each[0].fetch(told)
    path = root / "local/.skyrl_weight_sync/state.json"
    path.write_text(
        json.dumps(dict(version=1, write_in_progress=True, target_version=2, base_model_path=str(GOLDENS / KIND)))
    )
    with refusal(409) as found:
        clients.each[1].start()
        clients.each[1].update(told)
    assert "has broken off" in found["body"]
    clients.send(told)
    for engine in made:
        holds(engine, publisher.snapshot)
    # Removed files are noticed.
    shutil.rmtree(root / "local/weights")
    clients.send(told)
    for engine in made:
        holds(engine, publisher.snapshot)


@DELTA
def test_impossible_requests_are_refused_with_the_reason(host, engines, shared_root, tmp_path):
    _, root = host
    # A folder without any request so far.
    engine = engines(KIND, 1, "cpu", "--model-root", shared_root, which="new")
    client, publisher = DeltaClient(engine), Publisher(root / "published")
    told = publisher.publish()

    def refused(status, body, words, path="/fetch_weights"):
        with refusal(status) as found:
            client.call(path, body)
        message = json.loads(found["body"])["error"]["message"]
        assert words in message, message

    refused(409, told, "/init_weight_transfer_engine")
    for local, base, words in [
        (tmp_path / "elsewhere", None, "local_checkpoint_dir"),
        (GOLDENS / KIND, None, "local_checkpoint_dir"),
        (root / "local", "/no/such/model", "base_model_path"),
        (root / "local", "/etc", "base_model_path"),
    ]:
        refused(400, dict(init_info=publisher.init_info(local, base)), words, "/init_weight_transfer_engine")
    assert not (tmp_path / "elsewhere").exists()
    # The server was started with the name of a hub.
    client.init(publisher.init_info(root / "local", "Qwen/Qwen3-0.6B"))
    refused(400, dict(sync_dir=told["sync_dir"]), "target_version")
    refused(400, {**told, "sync_dir": "gs://bucket/run"}, "object store")
    refused(400, {**told, "uri": "s3://bucket/run/delta-00000001"}, "object store")
    refused(400, {**told, "sync_dir": str(tmp_path)}, "sync_dir")
    refused(400, {**told, "target_version": 9, "uri": None}, "delta-00000002")
    refused(400, dict(target_version=3, uri=told["uri"]), "sync_dir")
    refused(400, dict(target_version=1, sync_dir=str(root / "local")), "apart")
    client.fetch(told)
    publisher.publish()
    client.fetch(publisher.told())
    refused(409, told, "do not lead back")
    refused(409, dict(update_info=told), "it is of version 2", "/update_weights")
    client.update(publisher.told())
    holds(engine, publisher.snapshot)
