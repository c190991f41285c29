"""slime's weight updates: broadcasts, handles, both, checkpoints and deltas; engines that it did not start."""

import gc
import json
import os
import shutil
import urllib.request

import pytest
import safetensors.torch
import torch
from distributed_group import Group, trainer
from engines import DEVICES, GOLDENS, Beside, settled
from slime_client import Colocated, Failed, SlimeEngine, SlimeEngines, serve
from tensor_process import shared_files
from tensors import bucket, serialize

NCCL_FULL = pytest.mark.row(1, "slime / NCCL full")
COLOCATE = pytest.mark.row(2, "slime / colocate IPC")
MIXED = pytest.mark.row(3, "slime / mixed")
DISK = pytest.mark.row(4, "slime / disk full")
EXTERNAL = pytest.mark.row(6, "slime / external engines")

QUIET = dict(NCCL_NVLS_ENABLE="0", NCCL_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")


def nccl_of_torch():
    with open("/proc/self/maps") as file:
        return next((line.split()[-1] for line in file if "libnccl" in line), None)


@pytest.fixture(scope="module")
def stages():
    """The trainers' source ranks, one for each pipeline stage."""
    made = []

    def start(count, shapes, device):
        while len(made) < count:
            made.append(trainer(QUIET))
        for process in made[:count]:
            process("start", device=device, shapes=[[name, list(shape)] for name, shape in shapes.items()])
        return made[:count]

    yield start
    for process in made:
        process.close()


def halves(shapes):
    """The tensors of each pipeline stage: embeddings and the first layers; the other layers and the head."""
    names = list(shapes)
    return [names[: len(names) // 2], names[len(names) // 2 :]]


def buckets(names, count=4):
    """Experts come last, as slime sends them."""
    names = sorted(names, key=lambda name: ".experts." in name)
    size = -(-len(names) // count)
    return [names[at : at + size] for at in range(0, len(names), size)]


def layout(engine_list):
    """Joins a group: the trainer, then the ranks of every engine."""
    return "t" + "".join(letter * engine.ranks for letter, engine in zip("abc", engine_list))


def join(engine_list, processes, names, backend):
    """A group for every stage. The engines are in several groups at the same time."""
    groups = []
    for name, process in zip(names, processes):
        group = Group(
            layout(engine_list),
            dict(zip("abc", engine_list)),
            [process],
            engine_list[0].shapes,
            name=name,
            backend=backend,
        )
        for engine in engine_list:
            SlimeEngine(engine.url).destroy_weights_update_group(name)
        group.join()
        groups.append(group)
    return groups


def broadcast(clients, group, variant, names, version):
    group.prepare(variant, names)
    replies = clients.begin(
        "update_weights_from_distributed",
        names,
        ["bfloat16"] * len(names),
        [list(group.shapes[name]) for name in names],
        group.name,
        version,
    )
    group.begin_send()
    (sent,) = group.end_trainers()
    assert not isinstance(sent, Exception), sent
    for reply in replies:
        assert reply.result()["success"] is True


def placed(engines, device, ranks, *flags):
    """Engines for broadcasts. NCCL allows one rank a GPU, and the trainer uses the first."""
    made = []
    for index, count in enumerate(ranks):
        if device == "cpu":
            made.append(engines("qwen3-moe", count, "cpu", *flags, which="ab"[index]))
        else:
            env = dict(QUIET, **({"REFIT_NCCL": nccl_of_torch()} if nccl_of_torch() else {}))
            made.append(engines("qwen3-moe", count, f"cuda:{index + 1}", *flags, which="ab"[index], env=env))
    return made


@NCCL_FULL
@pytest.mark.brings("group")
@pytest.mark.parametrize("device, ranks", [("cpu", [1, 2]), pytest.param("cuda", [1], marks=pytest.mark.cards(2))])
def test_a_group_for_every_pipeline_stage(engines, stages, device, ranks):
    """Engines of different sizes in two groups. Their buckets alternate, and requests stay open all the time."""
    served = placed(engines, device, ranks)
    # NCCL refuses two ranks of one communicator on a GPU but allows two communicators: the stages share the trainer's
    # GPU.
    processes = stages(2, served[0].shapes, "cpu" if device == "cpu" else "cuda:0")
    clients = SlimeEngines(*(engine.url for engine in served))
    groups = join(served, processes, ["slime-pp_0", "slime-pp_1"], "gloo" if device == "cpu" else "nccl")
    for engine in served:
        engine.spoil()
    try:
        for version, variant in enumerate([1, 2], 1):
            clients.all("pause_generation")
            clients.all("flush_cache")
            for group, names in zip(groups, halves(served[0].shapes)):
                for part in buckets(names, 2):
                    broadcast(clients, group, variant, part, str(version))
            assert [reply["success"] for reply in clients.all("post_process_weights", True, False)] == [True] * len(
                served
            )
            clients.all("continue_generation")
            for engine in served:
                engine.holds(variant)
            reply = clients.each[0].generate([5, 6, 7])
            assert reply["meta_info"]["weight_version"] == str(version), "as text, of every sample"
            assert (
                len(reply["meta_info"]["output_token_logprobs"]) == 4
                and reply["meta_info"]["finish_reason"]["type"] == "length"
            )
            assert [entry[1] for entry in reply["meta_info"]["output_token_logprobs"]] == reply["output_ids"]
    finally:
        for group in groups:
            group.leave()
    # Once more, as after a reconnection.
    (group,) = join(served, processes[:1], ["slime-pp_0"], "gloo" if device == "cpu" else "nccl")
    try:
        clients.all("pause_generation")
        for part in buckets(list(served[0].shapes)):
            broadcast(clients, group, 3, part, "3")
        clients.all("continue_generation")
        for engine in served:
            engine.holds(3)
    finally:
        group.leave()


@NCCL_FULL
@COLOCATE
@pytest.mark.brings("memory")
def test_a_pause_ends_requests_with_their_tokens_and_holds_new_ones(engines):
    engine = engines("qwen3-moe")
    client = SlimeEngine(engine.url)
    serve(engine, client, 1)
    running = Beside(lambda: client.generate([5, 6, 7], 480, sampling=dict(ignore_eos=True)))
    settled(
        lambda: engine.get("/v1/loads?include=core")["loads"][0]["num_running_reqs"],
        lambda count: count > 0 or running.done,
    )
    client.pause_generation()
    meta = running.result()["meta_info"]
    assert meta["finish_reason"]["type"] in ("abort", "length")
    assert len(meta["output_token_logprobs"]) == meta["completion_tokens"]
    held = Beside(lambda: client.generate([5, 6, 7]))
    client.flush_cache()
    serve(engine, client, 2, frame=False)
    assert not held.done
    client.continue_generation()
    assert held.result()["meta_info"]["weight_version"] == "2"


@COLOCATE
@pytest.mark.brings("memory")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_colocated_with_memory_that_is_released_and_resumed(engines, device, ranks):
    """offload, train, onload weights, update, onload the rest, generate."""
    env = {"REFIT_CUDA_SHARE_CARD": "1"} if device == "cuda" and ranks > torch.cuda.device_count() else None
    engine = engines("qwen3-moe", ranks, device, which="colocated", env=env)
    client, trainers = SlimeEngine(engine.url), Colocated(engine, "cpu" if device == "cpu" else "cuda:0")
    before = set(shared_files(os.getpid()))
    held = torch.cuda.memory_allocated() if device == "cuda" else 0
    for version in (1, 2):
        assert client.release_memory_occupation() is None
        client.resume_memory_occupation(["weights"])
        client.pause_generation()
        client.flush_cache()
        named = engine.tensors(version)
        shared = [pair for pair in named if ".experts." not in pair[0]]
        for at in range(0, len(shared), 6):
            trainers.send(client, [shared[at : at + 6]] * ranks, str(version))
        # Rank-local experts: each rank gets its own. A rank with fewer gets an empty bucket.
        experts = [pair for pair in named if ".experts." in pair[0]]
        trainers.send(client, [experts[rank::ranks] for rank in range(ranks)], str(version))
        trainers.send(client, [[]] * (ranks - 1) + [experts[:2]], str(version))
        trainers.send(client, [[]] * ranks, str(version))
        client.resume_memory_occupation(["kv_cache", "cuda_graph"])
        client.continue_generation()
        engine.holds(version)
        assert client.generate([5, 6, 7])["meta_info"]["weight_version"] == str(version)
    gc.collect()
    assert set(shared_files(os.getpid())) <= before
    if device == "cuda":
        torch.cuda.empty_cache()
        assert torch.cuda.memory_allocated() <= held, "a reply means that nothing of the trainer's is read any more"


@COLOCATE
def test_every_byte_is_read_before_the_reply(engines):
    """Stricter than SGLang: the sender overwrites its buffer right after the reply."""
    engine = engines("qwen3-moe")
    client = SlimeEngine(engine.url)
    flat = bucket(engine.tensors(1))
    entry = serialize(flat)
    client.update_weights_from_tensor([entry], "1")
    flat["flattened_tensor"].fill_(255)
    engine.holds(1)


@COLOCATE
def test_a_failure_is_a_status_with_json(engines):
    """slime reads only the status and leaves engines paused. The next update continues from there."""
    engine = engines("qwen3-moe")
    client = SlimeEngine(engine.url)
    serve(engine, client, 1)
    client.pause_generation()
    with pytest.raises(Failed, match=r"400: \{.*no_such"):
        client.update_weights_from_tensor(
            [serialize(bucket([("model.no_such.weight", torch.zeros(2, dtype=torch.bfloat16))]))], "2"
        )
    assert client.get_weight_version() == "1"
    serve(engine, client, 2)


@COLOCATE
@pytest.mark.brings("memory")
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_checker_finds_what_an_update_leaves_out(engines, ranks):
    """--check-weight-update-equal: snapshot, reset, update with the same weights, compare."""
    engine = engines("qwen3-moe", ranks)
    client = SlimeEngine(engine.url)
    serve(engine, client, 1)
    client.check_weights("snapshot")
    client.check_weights("reset_tensors")
    serve(engine, client, 1)
    assert client.check_weights("compare")["success"] is True
    named = engine.tensors(2)
    client.update_weights_from_tensor([serialize(bucket(named[:1]))] * ranks, "2")
    with pytest.raises(Failed, match="400"):
        client.check_weights("compare")
    serve(engine, client, 1)


@MIXED
@pytest.mark.brings("group", "memory")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cards(2))])
def test_remote_engines_are_updated_without_a_pause(engines, stages, device):
    """Only the colocated engine is paused. The other one gets the same buckets by broadcast while it generates."""
    colocated = engines("qwen3-moe", 1, device, which="colocated")
    (remote,) = placed(engines, device, [1])
    (process,) = stages(1, remote.shapes, "cpu" if device == "cpu" else "cuda:0")
    (group,) = join([remote], [process], ["slime"], "gloo" if device == "cpu" else "nccl")
    near, far = SlimeEngine(colocated.url), SlimeEngines(remote.url)
    trainers = Colocated(colocated, "cpu" if device == "cpu" else "cuda:0")
    try:
        for version in (1, 2):
            generating = Beside(lambda: far.each[0].generate([5, 6, 7], 64, sampling=dict(ignore_eos=True)))
            near.pause_generation()
            near.flush_cache()
            for names in buckets(list(remote.shapes), 3):
                trainers.send(near, [[pair for pair in colocated.tensors(version) if pair[0] in names]], str(version))
                broadcast(far, group, version, names, str(version))
            near.continue_generation()
            colocated.holds(version)
            remote.holds(version)
            assert generating.result()["meta_info"]["finish_reason"]["type"] == "length", "nobody ended it"
            assert {near.get_weight_version(), far.each[0].get_weight_version()} == {str(version)}
    finally:
        group.leave()


def checkpoint(engine, folder, variant):
    """Writes a whole Hugging Face checkpoint as slime does."""
    folder.mkdir(parents=True)
    shutil.copy(GOLDENS / engine.kind / "config.json", folder)
    safetensors.torch.save_file(dict(engine.tensors(variant)), folder / "model.safetensors")
    return folder


@DISK
@pytest.mark.brings("files")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_for_every_version(engines, ranks, tmp_path_factory):
    shared = tmp_path_factory.mktemp("shared")
    engine = engines("qwen3-moe", ranks, "cpu", "--model-root", shared, which="disk")
    client = SlimeEngine(engine.url)
    for version in (1, 2, 3):
        folder = checkpoint(engine, shared / f"weight_v{version:06d}", version)
        client.pause_generation()
        client.flush_cache()
        client.update_weights_from_disk(folder, str(version))
        assert client.get_weight_version() == str(version)
        # The trainer removes it before generation goes on.
        shutil.rmtree(folder)
        client.continue_generation()
        engine.holds(version)
        assert client.generate([5, 6, 7])["meta_info"]["weight_version"] == str(version)
    with pytest.raises(Failed, match="400"):
        client.update_weights_from_disk(shared / "weight_v000009", "9")
    assert client.get_weight_version() == "3"


@EXTERNAL
@pytest.mark.brings("memory")
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_options_that_slime_compares_of_an_engine_that_it_did_not_start(engines, ranks):
    engine = engines("qwen3-moe", ranks)
    for path in ("/server_info", "/get_server_info"):
        with urllib.request.urlopen(engine.url + path, timeout=30) as reply:
            info = json.load(reply)
        assert int(info.get("tp_size") or info.get("tensor_parallel_size") or 1) == ranks
        assert int(info.get("pp_size") or info.get("pipeline_parallel_size") or 1) == 1
        assert int(info.get("ep_size") or 1) == 1 and int(info.get("moe_dp_size") or 1) == 1
        assert int(info.get("num_gpus") or info.get("num_gpus_per_engine") or ranks) == ranks
        assert info.get("disaggregation_bootstrap_port") is None
        assert not info.get("encoder_only") and info.get("disaggregation_mode") not in ("prefill", "decode"), (
            "a regular worker"
        )
        # slime compares these with the options that it sets when it starts engines itself.
        assert info.get("enable_memory_saver") == False  # noqa: E712
    client = SlimeEngine(engine.url)
    assert client.health_generate()
    serve(engine, client, 4)
    client.abort_all()
