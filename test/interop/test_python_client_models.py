"""clients/python/refit sends models as trainers hold them: of transformers, and sharded over processes."""

import textwrap

import pytest
import safetensors.torch
import torch
import transformers

from python_client import refit
from tensors import ROOT, checksum
from torchrun import torchrun

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "qwen3-moe", "llama"])
@pytest.mark.parametrize("way", ["handles", "upload"])
def test_a_model_of_transformers_is_sent_by_its_checkpoint_names(engine_of, model_of, kind, way):
    model, client = model_of(kind), refit.Client(engine_of(kind).url)
    torch.manual_seed(len(kind))
    trained = transformers.AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    trained.save_pretrained(model.folder / "trained")
    client.check_weights("reset_tensors")
    # Rounds as the engine does.
    with client.update(version="trained", transport=way, dtype=torch.bfloat16) as update:
        update.add_all(torch.compile(trained) if way == "upload" else trained)
    sums = client.checksums()
    saved = safetensors.torch.load_file(model.folder / "trained/model.safetensors")
    wanted = {name: checksum(tensor.to(torch.bfloat16)) for name, tensor in saved.items()}
    assert sums == {name: wanted[name] for name in sums} and client.weights()["state"] == "current"


SHARDED = """
    import sys
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    import transformers
    sys.path.insert(0, {client!r})
    import refit

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder, *ways = sys.argv[1:]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    ranks = dist.group.WORLD

    def send(way, url, out):
        client = refit.Client(url)
        group = client.group(backend="gloo") if way == "group" else None
        for step in range(1, 4):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.0 + 0.25 * step)
            options = dict(version=f"{{way}} {{step}}", transport=way, process_group=ranks, bucket_bytes=60_000)
            with client.update(**options, group=group) as update:
                update.add_all(model)
            assert update.requests > 3, update.requests
            dist.barrier()
        # Rank 0 is refused: all of them hear of it, and nobody waits for ever.
        try:
            with client.update(version="refused", transport=way, process_group=ranks, group=group) as update:
                update.add("no.such.weight", torch.zeros(4, dtype=torch.bfloat16))
            raise SystemExit("nothing was refused")
        except refit.RefitError as error:
            assert error.code == "WEIGHTS_UNKNOWN_NAME", error
        if dist.get_rank() == 0:
            assert update.outcome == {{client.url: "old"}}, update.outcome
            if group is not None:
                group.leave()
        whole = {{name: tensor.full_tensor() for name, tensor in model.state_dict().items()}}
        if dist.get_rank() == 0:
            torch.save(whole, out)
            client.release_kept()
        dist.barrier()

    for each in ways:
        print(each, flush=True)
        send(*each.split(","))
    dist.destroy_process_group()
"""


def test_a_model_sharded_over_two_processes_is_gathered_and_sent(engine_of, model_of, tmp_path):
    """One run of the trainer tests all transports, each with its own engine: its start takes longer than the updates.
    """
    model, script = model_of("qwen3"), tmp_path / "trainer.py"
    ways = [
        (way, engine_of("qwen3", ranks, letter), tmp_path / f"{way}-{ranks}.pt")
        for way, ranks, letter in [
            ("handles", 1, "a"),
            ("handles", 2, "a"),
            ("kept", 2, "b"),
            ("upload", 1, "b"),
            ("group", 2, "c"),
        ]
    ]
    script.write_text(textwrap.dedent(SHARDED.format(client=str(ROOT / "clients/python"))))
    arguments = [model.folder, *(f"{way},{server.url},{out}" for way, server, out in ways)]
    modules = ["transformers.models.qwen3.modeling_qwen3"]
    output = torchrun(script, 2, arguments, modules, tmp_path / "log", GLOO_SOCKET_IFNAME="lo")
    assert all(f"{way},{server.url}" in output for way, server, _ in ways)
    seen = set()
    for way, server, out in ways:
        client, whole = refit.Client(server.url), torch.load(out)
        sums = {name: checksum(tensor) for name, tensor in whole.items()}
        assert (
            client.checksums() == sums and client.version() == f"{way} 3" and client.weights() == {"state": "current"}
        ), way
        seen.add(tuple(sums.values()))
    assert len(seen) == len(ways), "what the one way brought is not what the next one did"
