"""clients/python/refit on GPUs: CUDA IPC handles, kept memory and NCCL groups.

The tests without a GPU are test/interop/test_python_client*.py.
"""

import gc
import os
import subprocess
import sys
import textwrap

import pytest
from conftest import ROOT
from server import Server
from tensors import Model, coded

sys.path.insert(0, str(ROOT / "clients/python"))
import refit  # noqa: E402


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return Model("qwen3", tmp_path_factory.mktemp("qwen3"))


def serve(model, *flags, cards=None):
    environment = {} if cards is None else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, cards))}
    return Server(
        model.folder, "--device", "cuda", "--max-total-tokens", 1024, "--skip-tokenizer-init", *flags, env=environment
    )


def on_card(model, variant, card=0):
    return [(name, coded(variant, name, shape).to(f"cuda:{card}")) for name, shape in model.shapes.items()]


def brought(server, model, variant):
    got, wanted = server.checksums(), model.checksums(variant)
    wrong = [name for name in wanted if got.get(name) != wanted[name]]
    assert not wrong, f"{len(wrong)} of {len(wanted)} tensors are not what was sent: {wrong[:5]}"
    assert server.get("/health")["weights"] == {"state": "current"}


def closed(server):
    """Checks that the server has closed everything that it opened for a request."""
    assert server.metric("refit:cuda_segments_opened_total") == server.metric("refit:cuda_segments_closed_total")
    assert server.metric("refit:tensor_files_opened_total") == server.metric("refit:tensor_files_closed_total")


@pytest.mark.cards(1)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("way", ["handles", "kept"])
def test_a_b_a_by_cuda_handles(model, way, in_place):
    import torch

    held = torch.cuda.memory_allocated()
    with serve(model) as server:
        client = refit.Client(server.url)
        named = on_card(model, 1)
        for step, variant in enumerate([1, 2, 1]):
            client.check_weights("reset_tensors")
            for (name, tensor), (_, values) in zip(named, on_card(model, variant)):
                tensor.copy_(values)
            with client.update(
                version=str(step), transport=way, in_place=in_place, bucket_bytes=100_000, expected="all"
            ) as update:
                update.add_all(named)
            brought(server, model, variant)
            assert client.version() == str(step) and update.outcome == {client.url: "new"}
        if way == "kept":
            assert server.metric("refit:kept_tensor_names") > 0
            client.release_kept()
        closed(server)
        del named, tensor, values
        gc.collect()
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_allocated() <= held, (
            f"{torch.cuda.memory_allocated() - held} bytes are held by what was shared"
        )


@pytest.mark.cards(1)
def test_a_torn_update_by_cuda_handles_heals(model):
    with serve(model) as server:
        client = refit.Client(server.url)
        with pytest.raises(ZeroDivisionError):
            with client.update(version="broken") as update:
                update.add_all(on_card(model, 2)[:5])
                update.flush()
                1 / 0
        assert (
            update.transport == "handles" and update.outcome == {client.url: "torn"} and client.version() == "default"
        )
        with client.update(version="healed") as update:
            update.add_all(on_card(model, 2))
        brought(server, model, 2)
        closed(server)


@pytest.mark.cards(1)
def test_tensors_of_a_gpu_go_into_an_engine_on_the_cpu_and_back(model):
    with Server(
        model.folder, "--device", "cpu", "--dtype", "bfloat16", "--max-total-tokens", 1024, "--skip-tokenizer-init"
    ) as server:
        client = refit.Client(server.url)
        for variant, way in enumerate(["handles", "upload", "kept"], 1):
            with client.update(transport=way) as update:
                update.add_all(on_card(model, variant))
            brought(server, model, variant)
        client.release_kept()
    with serve(model) as server:
        client = refit.Client(server.url)
        with client.update() as update:
            update.add_all(model.tensors(3))
        brought(server, model, 3)


@pytest.mark.cards(2)
def test_two_ranks_read_one_gpu_and_gpu_numbers_may_differ(model):
    """The server numbers the GPUs in the other order. Handles name a GPU by its UUID."""
    with serve(model, "--tp", 2, cards=[1, 0]) as server:
        client = refit.Client(server.url)
        for variant, card in ((1, 0), (2, 1)):
            with client.update() as update:
                update.add_all(on_card(model, variant, card))
            brought(server, model, variant)
        closed(server)


TRAINER = """
    import os, sys
    import torch, torch.distributed as dist
    sys.path[:0] = {paths!r}
    import refit
    from tensors import coded
    import json

    url, shapes, ways = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3].split(",")
    rank = int(os.environ.get("RANK", 0))
    torch.cuda.set_device(rank)
    ranks = None
    if "RANK" in os.environ:
        dist.init_process_group("cpu:gloo,cuda:nccl")
        ranks = dist.group.WORLD
    clients = refit.Clients(url.split(","))
    for variant, way in enumerate(ways, 1):
        group = clients.group(backend="nccl", timeout_s=60) if way == "nccl" else None
        for again in range(2):
            options = dict(transport="group" if group else way, group=group, bucket_bytes=100_000, process_group=ranks)
            with clients.update(version=f"{{way}} {{again}}", **options) as update:
                update.add_all((name, coded(variant + again, name, shape).cuda()) for name, shape in shapes.items())
        if group:
            group.leave()
    if rank == 0:
        clients.engines[0].kept.clear()
        clients.release_kept()
    if ranks is not None:
        dist.barrier()
        dist.destroy_process_group()
"""


def train(model, tmp_path, urls, ways, ranks=None, cards=None):
    import json

    script = tmp_path / "trainer.py"
    script.write_text(
        textwrap.dedent(
            TRAINER.format(paths=[str(ROOT / "clients/python"), str(ROOT / "test/gpu"), str(ROOT / "test/interop")])
        )
    )
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    environment = {**os.environ, **({} if cards is None else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, cards))})}
    command = [sys.executable, *launcher, str(script), ",".join(urls), json.dumps(model.shapes), ",".join(ways)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


@pytest.mark.cards(2)
def test_two_trainers_send_one_rank_each(model, tmp_path):
    with serve(model, "--tp", 2) as server:
        train(model, tmp_path, [server.url], ["handles", "kept"], ranks=2)
        brought(server, model, 3)
        assert server.get("/get_weight_version")["weight_version"] == "kept 1"
        closed(server)


@pytest.mark.cards(2)
def test_a_group_over_nccl(model, tmp_path):
    with serve(model, cards=[1]) as server:
        train(model, tmp_path, [server.url], ["nccl"], cards=[0])
        brought(server, model, 2)
        assert server.get("/get_weight_version")["weight_version"] == "nccl 1"
        assert server.get("/server_info")["weight_groups"] == []


@pytest.mark.cards(4)
def test_a_group_over_nccl_of_two_engines_of_different_sizes(model, tmp_path):
    with serve(model, cards=[1]) as one, serve(model, "--tp", 2, cards=[2, 3]) as two:
        train(model, tmp_path, [one.url, two.url], ["nccl"], cards=[0])
        for server in (one, two):
            brought(server, model, 2)


@pytest.mark.cards(1)
def test_a_group_over_nccl_on_one_gpu_is_refused_with_the_reason(model):
    import torch

    torch.cuda.set_device(0)
    with serve(model) as server:
        client = refit.Client(server.url)
        with pytest.raises(refit.RefitError) as refused:
            with client.update(group=client.group(backend="nccl", timeout_s=30)) as update:
                update.add_all(on_card(model, 1))
        assert refused.value.code in ("GROUP_REFUSED", "GROUP_BROKEN"), refused.value
        with client.update(transport="handles") as update:
            update.add_all(on_card(model, 2))
        brought(server, model, 2)
