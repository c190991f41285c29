"""examples/trainers with a server: four processes with a quarter of each parameter, two ranks with other parts."""

import json
import urllib.request

import pytest
import safetensors.torch
import torch
import transformers

from conftest import ROOT
from tensors import checksum, checksums, metric, post
from torchrun import torchrun


def start_of(folder):
    torch.manual_seed(2)
    config = transformers.LlamaConfig(
        hidden_size=1024,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=320,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
    )
    transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


# The examples import these, and transformers does for the model.
MODULES = ["common", "process_group", "transformers.models.llama.modeling_llama"]


def train(example, processes, *arguments, log):
    program = ROOT / f"examples/trainers/{example}.py"
    assert "step 2: updated" in torchrun(program, processes, arguments, MODULES, log)


@pytest.mark.parametrize("example", ["verl_style", "slime_style"])
def test_fsdp_over_four_reaches_tensor_parallelism_over_two_element_by_element(serve, tmp_path, example):
    server = serve(start_of(tmp_path / "start"), "--tp", 2, "--max-total-tokens", 512, "--skip-tokenizer-init")
    start = checksums(server)
    train(
        example,
        4,
        "--url",
        server.url,
        "--model",
        tmp_path / "start",
        "--steps",
        2,
        "--bucket-mb",
        3,
        "--save",
        tmp_path / "end",
        log=tmp_path / "log",
    )
    trained = safetensors.torch.load_file(tmp_path / "end/model.safetensors")
    assert checksums(server) == {name: checksum(tensor) for name, tensor in trained.items()}
    assert all(start[name] != checksum(tensor) for name, tensor in trained.items() if tensor.dim() == 2), (
        "every matrix moved"
    )
    name = "model.layers.0.self_attn.o_proj.weight"
    assert trained[name].shape == (1024, 1024)
    got = torch.tensor(post(server, "/get_weights_by_name", {"name": name, "truncate_size": 1024}))
    assert torch.equal(got, trained[name].float())
    with urllib.request.urlopen(server.url + "/get_weight_version") as reply:
        assert json.load(reply)["weight_version"] == "step-2"
    assert metric(server, "tensor_files_opened_total") == metric(server, "tensor_files_closed_total") > 0


@pytest.mark.parametrize("format", [[], ["--bucketed"]], ids=["each", "bucketed"])
def test_the_first_of_two_fsdp_trainers_broadcasts_to_two_engines(serve, tmp_path, format):
    """examples/trainers/broadcast_style.py under torchrun: one trainer, an engine of one rank and one of two."""
    servers = [
        serve(start_of(tmp_path / "start"), "--tp", ranks, "--max-total-tokens", 512, "--skip-tokenizer-init")
        for ranks in [1, 2]
    ]
    urls = ["--url", servers[0].url, "--and-url", servers[1].url]
    train(
        "broadcast_style",
        2,
        *urls,
        "--model",
        tmp_path / "start",
        "--steps",
        2,
        "--bucket-mb",
        3,
        "--save",
        tmp_path / "end",
        *format,
        log=tmp_path / "log",
    )
    wanted = {
        name: checksum(tensor)
        for name, tensor in safetensors.torch.load_file(tmp_path / "end/model.safetensors").items()
    }
    for server in servers:
        assert checksums(server) == wanted
        assert post(server, "/update_weight_version", {"new_version": "after"})["success"] is True
        with urllib.request.urlopen(server.url + "/health") as reply:
            assert json.load(reply)["status"] != "paused"
