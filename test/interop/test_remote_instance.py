"""A server sends its weights to a torch process (gloo) that joins as SGLang's remote instance loader does."""

import concurrent.futures
import json
import pathlib
import sys
import urllib.request

import pytest
import safetensors.torch
import torch
import torch.distributed as dist

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "examples/trainers"))

from process_group import init_custom_process_group  # noqa: E402
from conftest import Server  # noqa: E402
from server import free_port  # noqa: E402

MODEL = ROOT / "models/adder"
INIT = "/init_weights_send_group_for_remote_instance"
SEND = "/send_weights_to_remote_instance"


def post(server, path, body):
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    return json.loads(urllib.request.urlopen(request, timeout=60).read())


def received(server, shapes, layout):
    """Receives the broadcasts of one transfer, each of so many bfloat16 values."""
    torch.set_num_threads(1)
    port = free_port()
    body = {"master_address": "127.0.0.1", "ports": str(port), "group_name": "send_weights_1", "backend": "gloo"}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        joined = pool.submit(
            post, server, INIT, {**body, "group_rank": 0, "world_size": 2, "piece_bytes": 1 << 30, **layout}
        )
        group = init_custom_process_group("gloo", f"tcp://127.0.0.1:{port}", 2, 1, f"send_weights_1_{port}_0")
        dist.barrier(group)
        assert joined.result() == {
            "success": True,
            "message": f"Succeeded to init group through 127.0.0.1:{port} group.",
        }
        sent = pool.submit(post, server, SEND, body)
        tensors = []
        for count in shapes:
            tensor = torch.empty(count, dtype=torch.bfloat16)
            dist.broadcast(tensor, 0, group=group)
            tensors.append(tensor)
        reply = sent.result()
    dist.destroy_process_group(group)
    assert reply["message"] == f"Succeeded to send weights through 127.0.0.1:{port} send_weights_1."
    assert reply["weight_version"] == "v5"
    return tensors


@pytest.fixture(scope="module")
def server():
    """It only sends, so it stays as it is."""
    made = Server(MODEL, "--threads", "1", "--weight-version", "v5")
    yield made
    made.stop()


def test_parameters_of_a_rank_arrive_one_after_another(server):
    weights = safetensors.torch.load_file(MODEL / "model.safetensors")
    config = json.loads((MODEL / "config.json").read_text())
    hidden, width, heads, kv, head = (
        config[name]
        for name in ["hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"]
    )
    vocab = -(-config["vocab_size"] // 64) * 64
    # The order of refit's parameters. Each layer has qkv, o, q_norm, k_norm, gate_up, down, ln1, ln2.
    layer = [
        (heads + 2 * kv) * head * hidden,
        hidden * heads * head,
        head,
        head,
        2 * width * hidden,
        hidden * width,
        hidden,
        hidden,
    ]
    tensors = received(server, [vocab * hidden, *layer * config["num_hidden_layers"], hidden], {})
    embed = weights["model.embed_tokens.weight"]
    assert torch.equal(tensors[0][: embed.numel()].view(embed.shape), embed)
    for i in range(config["num_hidden_layers"]):
        of = lambda name: weights[f"model.layers.{i}.{name}.weight"].flatten()  # noqa: E731
        expected = [
            torch.cat([of(f"self_attn.{x}_proj") for x in "qkv"]),
            of("self_attn.o_proj"),
            of("self_attn.q_norm"),
            of("self_attn.k_norm"),
            torch.cat([of("mlp.gate_proj"), of("mlp.up_proj")]),
            of("mlp.down_proj"),
            of("input_layernorm"),
            of("post_attention_layernorm"),
        ]
        for tensor, other in zip(tensors[1 + i * len(layer) :], expected):
            assert torch.equal(tensor, other)
    assert torch.equal(tensors[-1], weights["model.norm.weight"])


def test_whole_tensors_arrive_as_one_layout(server):
    weights = safetensors.torch.load_file(MODEL / "model.safetensors")
    names = ["model.embed_tokens.weight"]
    for i in range(json.loads((MODEL / "config.json").read_text())["num_hidden_layers"]):
        parts = [
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.o_proj",
            "self_attn.q_norm",
            "self_attn.k_norm",
            "mlp.gate_proj",
            "mlp.up_proj",
            "mlp.down_proj",
            "input_layernorm",
            "post_attention_layernorm",
        ]
        names += [f"model.layers.{i}.{part}.weight" for part in parts]
    names.append("model.norm.weight")
    offsets, end = {}, 0
    for name in names:
        offsets[name] = -(-end // 256) * 256
        end = offsets[name] + weights[name].numel() * 2
    (flat,) = received(server, [end // 2], {"layout": "checkpoint"})
    for name, offset in offsets.items():
        assert torch.equal(flat[offset // 2 : offset // 2 + weights[name].numel()], weights[name].flatten()), name
